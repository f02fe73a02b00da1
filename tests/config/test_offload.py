"""Which weights of a model stay in host memory, and what the plan makes of it."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.args.engine_args import EngineArgs
from quire.config.offload import Offload, choose_offload
from quire.config.planning import gather_model_facts
from quire.config.resolve.resolve import resolve
from quire.errors import InvalidParameter, InvalidType, LoadError, NotBuiltYet
from quire.hardware.facts import GpuFacts
from quire.models.loading.products import names_product, product_of
from tests.config import plans
from tests.config.plans import GIB, H200, make_machine

SIZE = 2 * sum(plans.LLAMA_8B_LAYER.values())


def plan_of(machine=None, model=None, **args):
    given = {"max_model_len": 2048, **args}
    return resolve(EngineArgs(model="m", **given), model or plans.llama_8b(), machine or on_a_gpu())


def on_a_gpu(host=200 * GIB):
    return make_machine(gpu=H200.gpu, torch_cuda="13.0", free_memory_bytes=host)


def test_the_last_layers_of_each_group_are_offloaded():
    plan = plan_of(offload_group_size=8, offload_num_in_group=2, offload_prefetch_step=3)
    assert plan.model.offload.layers == (6, 7, 14, 15, 22, 23, 30, 31)
    assert (plan.model.offload.num_buffers, plan.model.offload.weights) == (3, ())
    assert plan.model.offload.host_bytes == 8 * SIZE
    assert plan.model.offload.device_bytes == 3 * SIZE
    assert plan.reasons["offload"] == "offload_group_size=8: layers 6 7 14 15 22 23 30 31"
    (said,) = (note for note in plan.notes if "are offloaded: 3.25 GiB of weights" in note)
    assert "3 buffers of 1.22 GiB on the GPU" in said and said in plan.explain()


def test_one_buffer_for_neighbours_is_said_to_be_slow():
    def is_said(**args):
        return any("Neighbouring layers" in note for note in plan_of(**args).notes)

    assert is_said(offload_group_size=8, offload_num_in_group=2)
    assert not is_said(offload_group_size=8, offload_num_in_group=2, offload_prefetch_step=2)
    assert not is_said(offload_group_size=2)


def test_memory_that_weights_leave_is_the_kv_caches():
    pool = {"max_model_len": 131_072, "max_num_seqs": 1024}
    whole, plan = plan_of(**pool), plan_of(**pool, offload_group_size=2)
    assert (
        whole.model.offload is None
        and whole.reasons["offload"] == "all weights are in the GPU's memory"
    )
    block = plan.memory.kv_cache_bytes // plan.memory.num_blocks
    saved = plan.model.offload.saved_bytes
    assert saved == 15 * SIZE
    assert abs(plan.memory.kv_cache_bytes - whole.memory.kv_cache_bytes - saved) < block
    assert "on the host" in plan.reasons["num_blocks"]


def test_a_model_larger_than_the_gpu_runs_with_its_weights_on_the_host():
    gpu = GpuFacts("Small GPU", (8, 9), 20, 12 * GIB, 11 * GIB)
    small = make_machine(gpu=gpu, torch_cuda="13.0", free_memory_bytes=64 * GIB)
    with pytest.raises(LoadError, match="Small GPU has"):
        plan_of(small)
    assert plan_of(small, cpu_offload_gb=8).memory.num_blocks > 1


def test_a_size_takes_the_fewest_layers_far_apart():
    plan = plan_of(cpu_offload_gb=1)
    assert plan.model.offload.layers == (7, 15, 23, 31)
    assert 1 * GIB <= plan.model.offload.saved_bytes < 1 * GIB + SIZE
    narrow = plan_of(cpu_offload_gb=1, offload_params=["mlp.down"])
    assert len(narrow.model.offload.layers) == 11 and narrow.model.offload.weights == ("mlp.down",)


@given(
    sizes=st.lists(st.integers(0, 3 * GIB), min_size=2, max_size=20),
    gigabytes=st.floats(0.01, 30),
    ahead=st.integers(1, 4),
)
def test_what_is_saved_is_what_was_asked_for_or_refused(sizes, gigabytes, ahead):
    args = EngineArgs(cpu_offload_gb=gigabytes, offload_prefetch_step=ahead)
    layers = [{"mlp.up": size} for size in sizes]
    try:
        found = choose_offload(args, layers)
    except InvalidParameter as error:
        assert "Give less" in str(error)
        return
    assert found.saved_bytes >= gigabytes * GIB
    assert found.host_bytes == sum(sizes[layer] for layer in found.layers)
    assert list(found.layers) == sorted(set(found.layers))
    for place in range(found.num_buffers):
        assert found.layers[place :: found.num_buffers], "a buffer that nobody uses"


def test_rounded_weights_are_counted_as_they_are_kept():
    plan = plan_of(offload_group_size=4, quantization="int8")
    assert plan.model.offload.host_bytes == 4 * SIZE


SENSELESS = [
    ({"cpu_offload_gb": 1, "offload_group_size": 4}, "cpu_offload_gb", "Give one of them"),
    ({"offload_num_in_group": 2}, "offload_num_in_group", "offload_group_size=0"),
    ({"offload_group_size": 2, "offload_num_in_group": 3}, "offload_num_in_group", "=2 layers"),
    ({"offload_prefetch_step": 2}, "offload_prefetch_step", "goes with offload_group_size"),
    ({"offload_params": ["mlp"]}, "offload_params", "goes with offload_group_size"),
    ({"offload_group_size": 33}, "offload_group_size", "offloads 0 of 32 layers"),
    ({"offload_group_size": 32}, "offload_group_size", "offloads 1 of 32 layers"),
    ({"offload_group_size": 8, "offload_prefetch_step": 4}, "offload_group_size", "keeps as many"),
    ({"offload_group_size": 8, "offload_params": "w2"}, "offload_params", "are attn.o, attn.qkv"),
    ({"cpu_offload_gb": 13}, "cpu_offload_gb", "leave 12.59 GiB"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "name", "why"), SENSELESS, ids=lambda value: str(value)[:60])
def test_what_makes_no_sense_is_refused_in_a_sentence(given, name, why):
    with pytest.raises(InvalidParameter, match=name) as error:
        plan_of(**given)
    assert why in str(error.value)


@pytest.mark.parametrize(
    "given", [{"cpu_offload_gb": -1}, {"offload_group_size": -2}, {"offload_prefetch_step": 0}]
)
def test_numbers_out_of_range_are_refused(given):
    with pytest.raises(InvalidParameter):
        plan_of(**given)
    with pytest.raises(InvalidType):
        plan_of(offload_params=[3], offload_group_size=2)


@pytest.mark.parametrize("given", [{"cpu_offload_gb": 4}, {"offload_group_size": 4}])
def test_on_a_cpu_the_way_is_mapped_files(given):
    with pytest.raises(InvalidParameter, match="runs on the CPU") as error:
        plan_of(make_machine(), plans.tiny(), **given)
    assert "--load-format mmap" in str(error.value)
    neutral = {"cpu_offload_gb": 0, "offload_params": set(), "offload_prefetch_step": 1}
    assert plan_of(make_machine(), plans.tiny(), **neutral).model.offload is None


def test_a_host_without_room_and_models_of_transformers_are_refused():
    with pytest.raises(LoadError, match="in host memory, of which 2.00 GiB are free"):
        plan_of(on_a_gpu(host=2 * GIB), offload_group_size=2)
    foreign = {"model_impl": "transformers", "offload_group_size": 2}
    with pytest.raises(NotBuiltYet, match="model_impl=transformers"):
        plan_of(model=plans.make_model(model_impl="transformers"), **foreign)


def test_flags_and_facts_of_a_real_folder():
    parser_args = ["--offload-group-size", "2", "--offload-params", "mlp.down", "attn"]
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    args = EngineArgs.from_cli_args(parser.parse_args(parser_args))
    assert (args.offload_group_size, args.offload_params) == (2, ["mlp.down", "attn"])
    facts = gather_model_facts(EngineArgs())
    assert facts.layer_products and all(
        set(layer) == {"attn.qkv", "attn.o", "mlp.up", "mlp.down"} for layer in facts.layer_products
    )


def test_names():
    assert product_of("layers.3.mlp.experts.17.gate.weight") == "mlp.experts"
    assert product_of("layers.3.attn.gate.weight") == "attn.gate"
    assert product_of("layers.3.mlp.shared.gate.weight") == "mlp.shared.up"
    assert product_of("layers.3.mixer.in.weight") == "mixer"
    for name in ("mlp", "mlp.down", "down", "down_proj", "mlp.down_proj.weight"):
        assert names_product(name, "mlp.down"), name
    for name in ("ml", "down_", "attn", "mlp.up", "own"):
        assert not names_product(name, "mlp.down"), name


def test_nothing_is_saved_by_nothing():
    assert Offload().saved_bytes == 0
