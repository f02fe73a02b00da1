"""Adapters of ranks: the bits of one worker, with rows of several adapters and of none in the same
steps, read while steps run.
"""

from __future__ import annotations

import pytest

from quire.distributed.mesh import Mesh
from quire.engine.core.builder import build_core
from quire.engine.core.worker_program import worker_config
from quire.engine.wire.messages import AdapterRef
from quire.engine.wire.output_parts import FinishReason
from quire.testing import make_checkpoint
from tests.executor.ranks.test_launched import on_all, plans_of
from tests.executor.ranks.test_network_ranks import ThreadOfRank, core_of
from tests.executor.worker_cores import plan_of, requests, same_bits, serve
from tests.models.adapters.made import make_adapter
from tests.support.needs import needs_ranks

pytestmark = needs_ranks
WISHES = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
FOUR = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
SHAPE = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128,
    "intermediate_size": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPE, "llama", dtype="float32")


@pytest.fixture(scope="module")
def refs(checkpoint, tmp_path_factory):
    """None, and one adapter more than there are slots."""
    root = tmp_path_factory.mktemp("adapters")
    folders = [make_adapter(root / f"{n}", checkpoint, n) for n in (1, 2, 3)]
    return [None, *(AdapterRef(f"adapter{n}", n, str(f)) for n, f in enumerate(folders, 1))]


def asked(refs):
    given = requests(8)
    for request in given:
        request.adapter = refs[request.handle % 4]
    return given


@pytest.fixture(scope="module")
def right(checkpoint, refs):
    core = build_core(plan_of(checkpoint, **WISHES))
    found = serve(core, asked(refs))
    core.shutdown()
    assert {end.reason for end in found.ends.values()} == {FinishReason.LENGTH}
    return found


def test_ranks_have_the_bits_of_one_and_refuse_what_is_wrong(checkpoint, refs, right, tmp_path):
    plan = plan_of(checkpoint, **WISHES, **FOUR)
    config = worker_config(plan)
    core = core_of(plan, lambda rank: ThreadOfRank(rank, config), Mesh(2, 2))
    given = asked(refs)
    given[5].adapter = AdapterRef("broken", 9, str(tmp_path))
    found = serve(core, given)
    assert found.ends.pop(5).reason is FinishReason.ERROR
    others = [handle for handle in right.tokens if handle != 5]
    assert {h: found.tokens[h] for h in others} == {h: right.tokens[h] for h in others}
    assert same_bits(serve(core, asked(refs)), right)
    core.shutdown()


def test_processes_of_a_launcher_have_the_bits_of_one(checkpoint, refs, right, monkeypatch):
    plans = plans_of(checkpoint, monkeypatch, 2, tensor_parallel_size=2, **WISHES)

    def served(plan):
        core = build_core(plan)
        try:
            return serve(core, asked(refs))
        finally:
            core.shutdown()

    assert all(same_bits(found, right) for found in on_all(served, plans))


@pytest.mark.full
def test_processes_of_ranks_have_the_bits_of_one(checkpoint, refs, right):
    core = build_core(plan_of(checkpoint, **WISHES, **FOUR))
    assert same_bits(serve(core, asked(refs)), right)
    core.shutdown()
