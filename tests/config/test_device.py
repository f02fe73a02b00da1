"""Which device is chosen, what the plan says of a GPU, and the arithmetic of its memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from quire.config.args.engine_args import EngineArgs
from quire.config.kv_pool_size import MeasuredMemory
from quire.config.resolve.resolve import resolve
from quire.errors import InvalidParameter, LoadError, NotBuiltYet
from quire.hardware.facts import GpuFacts
from quire.models.kv_pool import plan_kv_pool
from quire.models.layer_memory import NumberBytes
from quire.models.pooling.spec import PoolerSpec
from tests.config import plans

GIB = plans.GIB

H200 = GpuFacts("NVIDIA H200", (9, 0), 132, 141 * GIB, 140 * GIB)
OLD = GpuFacts("Tesla V100", (7, 0), 80, 16 * GIB, 15 * GIB)


def machine(gpu=H200, torch_cuda="13.0", missing=""):
    return plans.make_machine(gpu=gpu, torch_cuda=torch_cuda, gpu_missing=missing)


def plan_of(model=None, on=None, **wishes):
    return resolve(EngineArgs(model="m", **wishes), model or plans.llama_8b(), on or machine())


def test_float32_checkpoints_of_models_that_pool_become_float16_on_a_gpu():
    pooler = PoolerSpec(("embed",), "cls")
    stored = structs.replace(plans.tiny(), pooler=pooler, generates=False)
    assert (
        plan_of(stored).model.dtype == "float16" and plan_of(plans.tiny()).model.dtype == "bfloat16"
    )
    assert plan_of(structs.replace(stored, model_type="gemma3_text")).model.dtype == "bfloat16"
    assert plan_of(stored, plans.make_machine(features=("avx512_bf16",))).model.dtype == "bfloat16"


def test_pooling_as_well_changes_nothing_of_generation():
    both = structs.replace(plans.tiny(), pooler=PoolerSpec(("embed",), also_generates=True))
    plan, alone = plan_of(both), plan_of(plans.tiny())
    assert (
        (plan.model.dtype, plan.parallel.use_graphs)
        == (alone.model.dtype, alone.parallel.use_graphs)
        == ("bfloat16", True)
    )
    for name in ("dtype", "use_graphs"):
        assert plan.reasons[name] == alone.reasons[name]


def test_a_usable_gpu_is_taken_and_what_follows_from_it():
    plan = plan_of(max_model_len=8192)
    assert plan.parallel.device == "cuda" and "NVIDIA H200" in plan.reasons["device"]
    assert plan.model.dtype == "bfloat16" and plan.steps.max_steps_in_flight == 2
    assert plan.memory.memory_utilization == 0.9 and plan.memory.measures_memory
    assert plan.steps.max_num_batched_tokens == 8192
    assert "CUDA graphs" in plan.reasons["use_graphs"]
    room = 0.9 * 140 * GIB - 2 * 8_030_261_248
    assert 0.8 * room < plan.memory.kv_cache_bytes <= room


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (machine(gpu=None, missing="no NVIDIA driver is installed here"), "no NVIDIA driver"),
        (machine(gpu=OLD), "Tesla V100 has compute capability 7.0"),
        (machine(torch_cuda=None), "the installed torch is built without CUDA"),
    ],
)
def test_without_a_usable_gpu(facts, why):
    plan = plan_of(plans.tiny(), facts)
    assert plan.parallel.device == "cpu" and why in plan.reasons["device"]
    assert plan.steps.max_steps_in_flight == 1 and not plan.memory.measures_memory
    with pytest.raises(InvalidParameter, match=why) as error:
        plan_of(plans.tiny(), facts, device="cuda")
    assert "device='cpu'" in str(error.value)


@pytest.mark.parametrize("given", ["fp8", "fp8_e4m3", "fp8_per_token_head"])
def test_kv_memory_in_8_bit_floats_counts_a_scale_for_every_key_and_value(given):
    pool = {"num_gpu_blocks_override": 100, "max_model_len": 512}
    wide, plan = plan_of(**pool), plan_of(**pool, kv_cache_dtype=given)
    assert plan.memory.kv_dtype == "float8_e4m3fn" and given in plan.reasons["kv_dtype"]
    assert plan.memory.kv_cache_bytes / wide.memory.kv_cache_bytes == (128 + 4) / (2 * 128)


def test_weights_in_8_bit_floats_leave_room_for_blocks():
    pool = {"max_model_len": 131_072, "max_num_seqs": 1024}
    wide, plan = plan_of(**pool), plan_of(**pool, quantization="fp8")
    table = 128_256 * 4096  # the embedding keeps its type, and a head is planned beside it
    saved = 2 * 8_030_261_248 - (8_030_261_248 - table) - 3 * table
    assert plan.model.quantization == "fp8" and plan.model.dtype == "bfloat16"
    block = plan.memory.kv_cache_bytes // plan.memory.num_blocks
    assert abs(plan.memory.kv_cache_bytes - wide.memory.kv_cache_bytes - saved) < block


@pytest.mark.parametrize("wish", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_8_bit_floats_are_refused_on_a_gpu_that_has_none(wish):
    ampere = machine(GpuFacts("NVIDIA A100", (8, 0), 108, 80 * GIB, 79 * GIB))
    with pytest.raises(InvalidParameter, match="8.9 or more, and NVIDIA A100 has 8.0") as error:
        plan_of(on=ampere, **wish)
    assert "Use 'int8'" in str(error.value)
    ada = machine(GpuFacts("NVIDIA L4", (8, 9), 58, 24 * GIB, 23 * GIB))
    assert plan_of(on=ada, max_model_len=1024, **wish).parallel.device == "cuda"


def test_wishes_beat_the_automatic_choice():
    plan = plan_of(plans.tiny(), device="cpu")
    assert plan.parallel.device == "cpu" and plan.reasons["device"].endswith("device was given")
    assert plan_of(async_scheduling=False).steps.max_steps_in_flight == 1
    assert plan_of(gpu_memory_utilization=0.5).memory.memory_utilization == 0.5
    assert not plan_of(kv_cache_memory_bytes=20 * GIB).memory.measures_memory
    assert plan_of(num_gpu_blocks_override=9000).memory.num_blocks == 9000
    assert (
        plan_of(deterministic=True).parallel.is_deterministic
        and not plan_of().parallel.is_deterministic
    )
    assert not plan_of(enforce_eager=True).parallel.use_graphs


def test_copies_over_gpus_are_refused_with_what_to_do():
    with pytest.raises(NotBuiltYet, match="CUDA_VISIBLE_DEVICES"):
        plan_of(data_parallel_size=2)
    assert (
        plan_of(plans.tiny(), data_parallel_size=2, device="cpu").parallel.data_parallel_size == 2
    )


def test_a_model_that_the_gpu_cannot_hold_is_refused():
    small = GpuFacts("Small GPU", (8, 9), 20, 12 * GIB, 11 * GIB)
    with pytest.raises(LoadError, match="Small GPU has"):
        plan_of(on=machine(gpu=small))


@given(
    start=st.integers(0, 2**38),
    taken=st.integers(-(2**30), 2**38),
    share=st.floats(0.01, 1.0),
    block=st.integers(1, 2**24),
    most=st.integers(0, 10**6),
)
def test_blocks_never_take_more_than_the_share_or_than_there_is(start, taken, share, block, most):
    now = max(0, start - taken)
    memory = MeasuredMemory(start, now, share)
    blocks = memory.num_blocks(block, most)
    assert 0 <= blocks <= most and blocks * block <= now
    used = max(0, start - now) + blocks * block
    assert blocks == 0 or used <= start * share + 1
    if blocks < most:  # one more would be too many
        assert used + block > int(start * share) or (blocks + 1) * block > now


def test_enough_is_what_all_requests_can_hold():
    pool = plan_kv_pool(plans.llama_8b().memories, 16, NumberBytes(2, 2))
    assert pool.enough(3, 100, 1000) == 1 + 3 * 7


@pytest.mark.parametrize("others", ["AMD GPUs (ROCm 6.4.2)", "Intel GPUs (XPU 20250101)"])
def test_a_torch_for_gpus_of_others_is_refused_by_name(others):
    on = structs.replace(machine(), torch_other=others)
    plan = plan_of(plans.tiny(), on)
    assert plan.parallel.device == "cpu" and others in plan.reasons["device"]
    with pytest.raises(InvalidParameter, match="NVIDIA GPUs are supported") as error:
        plan_of(plans.tiny(), on, device="cuda")
    assert others in str(error.value)
