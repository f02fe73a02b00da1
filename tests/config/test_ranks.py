"""Plans of models that several workers share, and what is refused before any of them starts."""

from __future__ import annotations

import pytest

from quire import EngineArgs
from quire.errors import InvalidParameter, LoadError, NotBuiltYet
from quire.testing import make_checkpoint

SHAPE = {"num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2,
         "hidden_size": 128, "intermediate_size": 384}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), SHAPE, "llama", dtype="float32")


def plan_of(folder, **wishes):
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, device="cpu", **wishes)
    return args.create_engine_config()


def test_sizes_name_their_workers_layers_and_bits(folder):
    one = plan_of(folder).parallel
    assert (one.distributed_executor_backend, one.stage_layers) == ("uni", (5,))
    plan = plan_of(folder, tensor_parallel_size=2, pipeline_parallel_size=3)
    ranks = plan.parallel
    assert ranks.distributed_executor_backend == "mp"
    assert ranks.stage_layers == (2, 2, 1)
    assert ranks.same_bits_as_one_rank
    assert "a process for each of 6 workers" in plan.reasons["distributed_executor_backend"]
    assert plan.steps.max_steps_in_flight == 3
    view = plan.parallel_config
    assert (view.tensor_parallel_size, view.pipeline_parallel_size, view.world_size) == (2, 3, 6)
    assert view.distributed_executor_backend == "mp"


def test_the_layers_of_stages_can_be_given(folder, monkeypatch):
    monkeypatch.setenv("QUIRE_PP_LAYER_PARTITION", "1,3,1")
    assert plan_of(folder, pipeline_parallel_size=3).parallel.stage_layers == (1, 3, 1)
    for text, why in (
        ("1,4", "3 numbers whose sum"),
        ("1,1,1", "sum is 5"),
        ("5,0,0", "each stage has one"),
        ("1,x", "numbers"),
    ):
        monkeypatch.setenv("QUIRE_PP_LAYER_PARTITION", text)
        with pytest.raises(InvalidParameter, match=why):
            plan_of(folder, pipeline_parallel_size=3)


def test_threads_are_shared(folder):
    ranks = plan_of(folder, tensor_parallel_size=2, cpu_threads=6).parallel
    assert ranks.num_threads == 3
    assert len(ranks.thread_cpus) == 2
    assert plan_of(folder, tensor_parallel_size=4, cpu_threads=2).parallel.num_threads == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_memory_is_that_of_a_rank_which_repeats_heads_that_are_few(folder, size):
    wishes = {
        "num_gpu_blocks_override": 100,
        "block_size": 16,
        "max_model_len": 64,
        "dtype": "float32",
    }
    plan = plan_of(folder, tensor_parallel_size=size, **wishes)
    heads = max(1, 2 // size)
    assert plan.memory.kv_cache_bytes == 100 * 16 * 5 * 2 * heads * 32 * 4
    table, norms = plan.model.vocab_size * 128, 11 * 128
    attention = 128 * (8 + 2 * max(size, 2) + 8) * 32 // size
    layer = attention + 3 * 128 * 384 // size
    assert plan.model.weight_bytes == 4 * (table + norms + 5 * layer)
    assert plan.model.packed_weights_bytes == 0 or size == 1


def test_a_sum_in_another_order_is_said(tmp_path):
    shape = SHAPE | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    folder = make_checkpoint(tmp_path, shape, "llama", dtype="float32")
    plan = plan_of(folder, tensor_parallel_size=3)
    assert not plan.parallel.same_bits_as_one_rank
    assert "same_bits_as_one_rank         no" in plan.explain()
    assert "same bits as one rank: no." in plan.notes[-1]
    assert plan_of(folder, pipeline_parallel_size=2).parallel.same_bits_as_one_rank


@pytest.mark.parametrize(
    ("wishes", "error", "text"),
    [
        ({"tensor_parallel_size": 3}, LoadError, "8 heads, which 3 workers cannot share"),
        ({"pipeline_parallel_size": 6}, InvalidParameter, "5 layers, and each stage has one"),
        ({"tensor_parallel_size": 0}, InvalidParameter, "tensor_parallel_size=0"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            InvalidParameter, "runs one worker, not 2",
        ),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            InvalidParameter, "started 1 processes .* form groups of 2",
        ),
        (
            {"distributed_executor_backend": "ray", "model_impl": "transformers"},
            NotBuiltYet, "itself",
        ),
        ({"tensor_parallel_size": 2, "model_impl": "transformers"}, NotBuiltYet, "itself"),
        ({"tensor_parallel_size": 2, "nnodes": 2, "master_addr": ""}, InvalidParameter, "master"),
        ({"enable_eplb": True}, NotBuiltYet, "enable_eplb"),
        ({"fully_sharded_loras": True}, NotBuiltYet, "fully_sharded_loras"),
        ({"decode_context_parallel_size": 2}, NotBuiltYet, "decode_context_parallel_size"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_an_error_before_anything_starts(folder, wishes, error, text):
    with pytest.raises(error, match=text):
        plan_of(folder, **wishes)


@pytest.mark.parametrize(
    "wish",
    [
        {"enable_fault_tolerance": True},
        {"eplb_config": {"window_size": 10}},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_by_name(folder, wish):
    with pytest.raises(NotBuiltYet, match=next(iter(wish))):
        plan_of(folder, **wish)
