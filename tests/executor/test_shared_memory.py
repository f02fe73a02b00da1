"""Models whose workers exchange through shared memory: the bits of one worker, in eager steps and
in recorded ones, where the exchanges are native.
"""

import os

import pytest

from quire.distributed.shared_group import SharedExchange, SharedGroup
from quire.engine.wire.output_parts import FinishReason
from quire.executor import uniproc
from quire.hardware.native import find_native
from quire.testing import make_checkpoint
from tests.executor.test_shared_steps import FOUR_HEADS, break_worker
from tests.executor.worker_cores import open_core, requests, same_bits, serve

pytestmark = pytest.mark.skipif(
    find_native()[0] is None or not hasattr(os, "memfd_create"), reason="native code on Linux"
)
SMALL = 4096  # bytes of a slot: larger tensors go through in pieces


class OverMemory(SharedExchange):
    """In the place of an exchange between threads: they do not know that they share a process."""

    def __init__(self, size):
        super().__init__(size, SMALL)

    def groups(self):
        return [SharedGroup(self.fileno(), rank) for rank in range(self.size)]

    def abort(self, reason="another worker failed"):
        super().abort(reason)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(uniproc, "InprocExchange", OverMemory)
    shape = FOUR_HEADS | {"hidden_size": 128, "intermediate_size": 384}
    return make_checkpoint(tmp_path, shape, "llama", dtype="float32")


INT8 = {"dtype": "bfloat16", "quantization": "int8"}


@pytest.mark.parametrize(
    "kind", [{"enforce_eager": True}, INT8, pytest.param({}, marks=pytest.mark.full)], ids=str
)
def test_workers_have_the_bits_of_one(folder, kind):
    answers = []
    for num_workers in (1, 2, 4):
        core = open_core(folder, num_workers, **kind)
        answers.append(serve(core, requests(5)))
        core.shutdown()
    assert answers[0].logprobs and answers[0].prompts
    assert all(same_bits(answers[0], other) for other in answers[1:])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_on_one_worker_costs_its_request_alone(folder, rank):
    one = open_core(folder, 1)
    right = serve(one)
    one.shutdown()
    core = open_core(folder, 2)
    break_worker(core.executor.workers[rank], 2, "unnamed", "before")
    found = serve(core)
    core.shutdown()
    failed = {h for h, end in found.ends.items() if end.reason is FinishReason.ERROR}
    assert failed == {2}
    del found.tokens[2]
    assert found.tokens == {handle: right.tokens[handle] for handle in found.tokens}
