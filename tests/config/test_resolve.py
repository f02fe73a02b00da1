"""`resolve()`: relations between options, memory, lengths, types and sampling defaults."""

import copy
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.config.args.engine_args import EngineArgs
from quire.config.kv_pool_size import gib
from quire.config.plan import NOT_SHOWN
from quire.config.resolve.resolve import resolve
from quire.errors import (
    InvalidParameter,
    LoadError,
    NotBuiltYet,
    UnknownParameter,
    UnsupportedConfigValue,
)
from quire.hardware.host import gather_machine_facts
from quire.models.kv_pool import plan_kv_pool
from quire.models.layer_memory import KeyValues, Latents, NumberBytes
from quire.models.max_length import LengthFacts
from quire.scheduling.block_groups import FullGroup, SlidingGroup
from tests.config import plans
from tests.hardware import machines

GIB = plans.GIB


def plan_of(model=None, machine=None, **wishes):
    return resolve(
        EngineArgs(model="m", **wishes), model or plans.make_model(), machine or plans.LAPTOP
    )


@pytest.mark.parametrize("name", plans.PAIRS)
def test_pure_and_every_value_has_a_reason(name):
    args, model, machine = plans.PAIRS[name]
    before = copy.deepcopy((args, model, machine))
    plan = resolve(args, model, machine)
    assert plan == resolve(args, model, machine)
    assert (args, model, machine) == before
    assert {field for field, _ in plan.decided()} == set(plan.reasons) - set(NOT_SHOWN)
    assert all(plan.reasons.values())
    assert "auto" not in [value for _, value in plan.decided()]
    with pytest.raises(AttributeError):
        plan.model.seed = 1


@pytest.mark.parametrize(
    ("wishes", "tokens", "seqs"),
    [
        ({}, 4096, 256),
        ({"max_num_batched_tokens": 16}, 16, 16),
        ({"max_num_seqs": 8}, 4096, 8),
        ({"max_num_seqs": 5000}, 5000, 5000),
        ({"max_num_seqs": 2, "max_model_len": 100}, 200, 2),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, 64, 64),
        ({"enable_chunked_prefill": False}, 40_960, 256),
        ({"enable_chunked_prefill": False, "max_model_len": 512}, 4096, 256),
    ],
    ids=str,
)
def test_tokens_and_requests_of_a_step(wishes, tokens, seqs):
    plan = plan_of(machine=plans.SERVER, **wishes)
    assert (plan.steps.max_num_batched_tokens, plan.steps.max_num_seqs) == (tokens, seqs)
    assert plan.steps.max_num_batched_tokens >= plan.steps.max_num_seqs


@pytest.mark.parametrize(
    ("wishes", "tokens"),
    [({}, 2048), ({"max_num_batched_tokens": 4096}, 4096), ({"max_num_seqs": 3000}, 3000)],
    ids=str,
)
def test_the_steps_of_a_server_are_shorter_on_a_cpu(wishes, tokens):
    wish = AsyncEngineArgs(model="m", **wishes)
    plan = resolve(wish, plans.make_model(), plans.SERVER)
    assert plan.steps.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("wishes", "part"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 17}, "at least max_num_seqs=17"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 65},
            "at least max_model_len=65",
        ),
        ({"max_model_len": 40_961}, "the model's limit is 40960"),
        ({"max_model_len": 0}, "at least 1, -1 or None"),
    ],
    ids=str,
)
def test_wishes_that_contradict_each_other_are_refused(wishes, part):
    with pytest.raises(InvalidParameter, match=re.escape(part)):
        plan_of(**wishes)


@pytest.mark.parametrize(
    ("stored", "machine", "wish", "dtype"),
    [
        ("bfloat16", plans.LAPTOP, "auto", "bfloat16"),
        ("float16", plans.LAPTOP, "auto", "float16"),
        ("float32", plans.LAPTOP, "auto", "float32"),
        ("float32", plans.SERVER, "auto", "bfloat16"),
        ("float32", plans.SERVER, "float", "float32"),
        ("bfloat16", plans.SERVER, "half", "float16"),
        ("float8_e4m3fn", plans.SERVER, "bfloat16", "bfloat16"),
    ],
)
def test_dtype(stored, machine, wish, dtype):
    plan = plan_of(plans.make_model(checkpoint_dtype=stored), machine, dtype=wish, max_model_len=64)
    assert (plan.model.dtype, plan.memory.kv_dtype) == (dtype, dtype)
    assert bool(plan.notes and "converts" in plan.notes[0]) == (
        {stored, dtype} == {"bfloat16", "float16"}
    )


def test_float16_is_refused_where_it_overflows():
    with pytest.raises(InvalidParameter, match="gemma2"):
        plan_of(plans.gemma_2b(), dtype="half")
    assert plan_of(plans.gemma_2b("float16")).model.dtype == "bfloat16"


def test_stored_type_that_cannot_compute_is_refused():
    with pytest.raises(UnsupportedConfigValue, match="float8_e4m3fn"):
        plan_of(plans.make_model(checkpoint_dtype="float8_e4m3fn"))


def test_kv_memory_is_never_more_than_is_useful():
    plan = plan_of(plans.tiny(), plans.SERVER, max_num_seqs=3, max_model_len=100)
    assert plan.memory.num_blocks == 1 + 3 * 4


def test_share_of_free_memory_counts_weights_in():
    plan = plan_of(gpu_memory_utilization=0.8)
    weights = 2 * plans.make_model().num_parameters
    assert plan.memory.kv_cache_bytes + weights <= 0.8 * plans.LAPTOP.free_memory_bytes
    assert plan.memory.kv_cache_bytes + weights > 0.6 * plans.LAPTOP.free_memory_bytes


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"gpu_memory_utilization": 0.8}, 0.8),
        ({"gpu_memory_utilization": 0.8, "num_gpu_blocks_override": 2000}, 0.8),
        ({"num_gpu_blocks_override": 2000}, 0.55),
        ({"kv_cache_memory_bytes": 1 << 30}, 0.18),
    ],
)
def test_the_share_of_memory_is_known_however_the_pool_was_sized(options, share):
    """A program that waits for an engine's memory to be free again computes with it."""
    plan = plan_of(max_model_len=256, **options)
    assert plan.memory.memory_utilization == share
    assert plan.cache_config.gpu_memory_utilization == share
    assert ("was given" in plan.reasons["memory_utilization"]) == (share == 0.8)


def test_overrides_of_the_pool():
    assert plan_of(num_gpu_blocks_override=2000, kv_cache_memory_bytes=1).memory.num_blocks == 2000
    block = 32 * 28 * 2 * 8 * 128 * 2
    plan = plan_of(kv_cache_memory_bytes=10 * block - 1, max_model_len=256)
    assert (plan.memory.num_blocks, plan.memory.kv_cache_bytes) == (9, 9 * block)


@pytest.mark.parametrize(
    "wishes",
    [
        {"num_gpu_blocks_override": 20},
        {"kv_cache_memory_bytes": 1 << 30},
        {"num_gpu_blocks_override": 5, "block_size": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [plans.make_model(), plans.gemma_2b()], ids=["full", "sliding"])
def test_too_little_memory_names_a_length_that_fits_and_the_next_does_not(model, wishes):
    small = model.length.default
    with pytest.raises(LoadError, match=f"max_model_len={small} needs") as caught:
        plan_of(model, max_model_len=small, **wishes)
    fits = int(re.search(r"Pass max_model_len=(\d+)", str(caught.value))[1])
    assert plan_of(model, max_model_len=fits, **wishes).model.max_model_len == fits
    with pytest.raises(LoadError):
        plan_of(model, max_model_len=fits + 1, **wishes)
    assert plan_of(model, max_model_len=-1, **wishes).model.max_model_len == fits


@pytest.mark.parametrize(
    "given", [{"kv_cache_memory_bytes": 1 << 50}, {"num_gpu_blocks_override": 10**9}], ids=str
)
def test_more_kv_memory_than_there_can_be_is_refused_before_it_is_asked_for(given):
    with pytest.raises(LoadError, match=f"{next(iter(given))}.* the machine has 16.00 GiB in all"):
        plan_of(**given)


def test_a_window_needs_only_its_window():
    pool = plan_kv_pool([KeyValues(1, 8, window=64)], 16, NumberBytes(2, 2))
    assert pool.least_blocks(10_000, is_chunked=True) == 5
    model = plans.make_model(memories=(KeyValues(8, 128, window=64),) * 28)
    assert plan_of(model, block_size=16, num_gpu_blocks_override=6).model.max_model_len == 40_960
    with pytest.raises(LoadError):
        plan_of(model, block_size=16, num_gpu_blocks_override=5)
    with pytest.raises(LoadError, match="needs 2560 KV blocks"):  # a whole prompt in one step
        plan_of(model, block_size=16, num_gpu_blocks_override=6, enable_chunked_prefill=False)


@given(
    st.integers(1, 64),
    st.integers(1, 5000),
    st.integers(1, 300),
    st.one_of(st.none(), st.integers(1, 700)),
)
def test_blocks_of_a_request_are_those_that_the_scheduler_counts(size, length, chunk, window):
    pool = plan_kv_pool([KeyValues(1, 8, window)], size, NumberBytes(2, 2))
    group = FullGroup(size) if window is None else SlidingGroup(size, window)
    assert pool.held_blocks(length, chunk) == group.num_needed(length, chunk)


@settings(deadline=None)
@given(
    st.integers(2, 400),
    st.integers(1, 64),
    st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=4),
)
def test_longest_is_the_border(num_blocks, size, windows):
    pool = plan_kv_pool([KeyValues(1, 8, w) for w in windows], size, NumberBytes(2, 2))
    limit = 3000
    for is_chunked in (True, False):
        longest = pool.longest(num_blocks, limit, is_chunked=is_chunked)

        def fits(length, is_chunked=is_chunked):
            return pool.least_blocks(length, is_chunked=is_chunked) <= num_blocks - 1

        assert longest == 0 or fits(longest)
        assert longest == limit or not fits(longest + 1)


def test_weights_that_do_not_fit_are_refused_with_the_sum():
    with pytest.raises(LoadError, match=r"weights 14\.96 GiB.*12\.00 GiB are free now"):
        plan_of(plans.llama_8b())


def test_threads_follow_cores_the_environment_and_the_wish():
    assert plan_of().parallel.num_threads == 4
    assert plan_of(machine=plans.make_machine(thread_limit=2)).parallel.num_threads == 2
    assert plan_of(machine=plans.make_machine(thread_limit=99)).parallel.num_threads == 4
    machine = plans.make_machine(thread_limit=2)
    assert plan_of(cpu_threads=7, machine=machine).parallel.num_threads == 7


def test_sampling_defaults_come_from_the_file_and_the_override():
    model = plans.make_model(
        generation_config={
            "temperature": 0.6,
            "top_k": None,
            "max_new_tokens": 7,
            "typical_p": 0.3,
            "eos_token_id": [5, 6, 5],
        }
    )
    plan = plan_of(model, override_generation_config={"top_p": 0.5, "temperature": 1})
    assert plan.sampling.sampling_defaults == {"temperature": 1, "top_p": 0.5, "max_tokens": 7}
    assert plan.sampling.generation_eos_token_ids == (5, 6)
    assert plan_of(
        model, override_generation_config={"eos_token_id": 9}
    ).sampling.generation_eos_token_ids == (9,)


def test_override_with_a_key_that_means_nothing_is_refused():
    with pytest.raises(UnknownParameter, match="typical_p"):
        plan_of(override_generation_config={"typical_p": 0.3})


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"eos_token_id": "</s>"}, {"top_k": True}])
def test_generation_config_of_another_form_is_refused(bad):
    with pytest.raises(UnsupportedConfigValue, match=next(iter(bad))):
        plan_of(plans.make_model(generation_config=bad))


def test_length_without_a_key_is_a_guess_that_says_so():
    model = plans.make_model(length=LengthFacts(None, None, "config.json names no length"))
    plan = plan_of(model)
    assert plan.model.max_model_len == 2048
    assert any("guess" in note for note in plan.notes)
    assert (
        plan_of(model, max_model_len=9999, kv_cache_memory_bytes=2 << 30).model.max_model_len
        == 9999
    )


def test_longer_than_the_short_form_is_told():
    model = plans.make_model(length=LengthFacts(131_072, 4096, "long rope"))
    assert plan_of(model).model.max_model_len == 4096
    assert any("long form" in note for note in plan_of(model, max_model_len=5000).notes)


@pytest.mark.parametrize(
    ("size", "text"), [(3 << 30, "3.00 GiB"), (1536, "1.50 KiB"), (5, "5 bytes")]
)
def test_bytes_for_people(size, text):
    assert gib(size) == text


@pytest.mark.parametrize("given", ["int8", "int8_per_token_head"])
def test_int8_kv_memory_counts_a_scale_for_every_key_and_value(given):
    pool = {"num_gpu_blocks_override": 100, "max_model_len": 512, "dtype": "bfloat16"}
    wide, plan = plan_of(**pool), plan_of(**pool, kv_cache_dtype=given)
    assert plan.memory.kv_dtype == "int8" and given in plan.reasons["kv_dtype"]
    assert plan.memory.kv_cache_bytes / wide.memory.kv_cache_bytes == (128 + 4) / (2 * 128)


@pytest.mark.parametrize(
    "wish", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}]
)
def test_8_bit_floats_are_refused_on_a_cpu_and_int8_is_named(wish):
    [(name, value)] = wish.items()
    with pytest.raises(InvalidParameter) as error:
        plan_of(**wish)
    assert str(error.value).startswith(f"{name}={value!r} is not allowed: 8-bit floats are for GPU")
    assert "this engine runs on the CPU" in str(error.value) and "Use 'int8'" in str(error.value)


@pytest.mark.parametrize("machine", [plans.LAPTOP, plans.H200], ids=["cpu", "cuda"])
def test_latents_are_kept_in_the_models_type(machine):
    model = plans.make_model(memories=(Latents(512, 64),) * 28)
    pool = {"num_gpu_blocks_override": 100, "max_model_len": 512, "dtype": "bfloat16"}
    plan = plan_of(model, machine, **pool)
    assert plan.memory.kv_cache_bytes == 100 * 28 * plan.memory.block_size * (512 + 64) * 2
    with pytest.raises(NotBuiltYet, match="kv_cache_dtype='int8 with latent attention'"):
        plan_of(model, machine, **pool, kv_cache_dtype="int8")


def test_kv_memory_may_be_named_as_the_dtype_that_it_has_and_not_as_another():
    assert plan_of(kv_cache_dtype="bfloat16", dtype="bfloat16").memory.kv_dtype == "bfloat16"
    with pytest.raises(NotBuiltYet, match="'auto', which is float32 here, or 'int8'"):
        plan_of(kv_cache_dtype="bfloat16", dtype="float32")


def test_threads_are_bound_where_a_cpu_is_better_than_another(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    facts = gather_machine_facts(machines.write(tmp_path, machines.SERVER))
    machine = plans.make_machine(
        num_cores=8, cpus=facts.cpus, node_free_bytes=facts.node_free_bytes
    )
    assert plan_of(machine=machine).parallel.thread_cpus == ("4-7",)
    plan = plan_of(machine=machine, data_parallel_size=2, max_model_len=2048)
    assert (plan.parallel.num_threads, plan.parallel.thread_cpus) == (4, ("4-7", "0-3"))
    assert plan_of(data_parallel_size=2, max_model_len=2048).parallel.thread_cpus == ("", "")
    gpu = msgspec.structs.replace(plans.H200, cpus=machine.cpus)
    assert plan_of(machine=gpu).parallel.thread_cpus == ("",)


def test_processors_of_installed_packages_come_first(packages, monkeypatch):
    """VLLM_PLUGINS does not limit them: without them answers would be others."""
    points = {"quire.logits_processors": {"x": "One"}, "vllm.logits_processors": {"y": "Two"}}
    packages.install("installed", "", points)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    plan = EngineArgs(logits_processors=["given:Two"]).create_engine_config()
    found = ("installed:One", "installed:Two", "given:Two")
    assert plan.sampling.logits_processors == found
    assert "installed:One" in plan.reasons["logits_processors"]
    plan = EngineArgs(runner="pooling", convert="embed").create_engine_config()
    assert plan.sampling.logits_processors == (), "vectors are not drawn"
    plan = EngineArgs(runner="generate", convert="embed").create_engine_config()
    assert plan.sampling.logits_processors == found[:2], "tokens are drawn, too"
