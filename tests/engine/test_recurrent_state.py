"""Promise P4 for recurrent states: the same bits alone, in a crowd, in chunks cut at odd places,
after preemption, after prefix hits that begin from snapshots at any place, and after the death of
the core.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from quire import AsyncLLM
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.config.resolve import memory
from quire.engine.control_verbs import perform
from quire.engine.core import builder
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest
from quire.hardware.native import find_native
from quire.params import RequestOutputKind, SamplingParams
from quire.scheduling.state_blocks import StateBlocks
from tests.models.hostile.models import Library

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=REASON)

MODELS = ("mamba", "mamba2", "qwen3_5", "lfm2", "falcon_h1")
NUM_OUTPUT = 8
LOADS = {
    "one step": {},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "preempted": {"max_num_batched_tokens": 13},
    "bfloat16": {"dtype": "bfloat16"},
}
CASES = [
    pytest.param(
        name, load, marks=() if name == "qwen3_5" or load == "preempted" else pytest.mark.full
    )
    for name in MODELS
    for load in LOADS
]
PREEMPTED_AFTER = (3, 7, 14, 21, 29)
"""Steps. Without an end, prompts that are cut at every border would start over again and again."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = Library(tmp_path_factory.mktemp("made"))
    return lambda name: made[name].folder


@pytest.fixture
def close_snapshots(monkeypatch):
    """Snapshots at every border, in as many blocks as there are."""
    monkeypatch.setattr(memory, "SNAPSHOT_INTERVAL", 1)
    monkeypatch.setattr(builder, "SNAPSHOT_SHARE", 1.0)


def open_core(folder, **args):
    defaults = {
        "dtype": "float32", "block_size": 2, "max_model_len": 64, "max_num_seqs": 8,
        "num_gpu_blocks_override": 400, "cpu_threads": 2,
    }  # fmt: skip
    most = args.get("max_num_batched_tokens", 8)
    defaults["max_num_seqs"] = min(8, most)
    return build_core(
        make_plan(EngineArgs(model=str(folder), skip_tokenizer_init=True, **defaults | args))
    )


def prompts():
    """Prompts with equal beginnings that end at different places of a block."""
    draw = random.Random(5)
    start = [draw.randrange(3, 96) for _ in range(24)]
    return [start[:cut] + [draw.randrange(3, 96) for _ in range(n)] for cut, n in
            ((0, 1), (24, 3), (13, 9), (24, 4), (8, 17), (24, 1), (17, 2), (6, 30))]  # fmt: skip


def run(core, wanted, preempt_after=()):
    """Ids and log-probabilities of each prompt, run together."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=0)
    for handle, ids in wanted.items():
        core.add_request(EngineCoreRequest(handle, ids, params.clone(), seed=0, arrival_time=0.0))
    found, steps = {handle: [] for handle in wanted}, 0
    while core.has_work:
        steps += 1
        if steps in preempt_after:
            perform(core, "reset_prefix_cache", (True,))
        out = core.step()
        for i, (handle, token) in enumerate(zip(out.handles, out.token_ids, strict=True)):
            chance = float(out.logprobs.values[list(out.logprobs.index).index(i), 0])
            found[handle].append((token, chance))
        assert all(str(end.reason) == "length" for end in out.finished), out.finished
    return found


@pytest.mark.parametrize(("name", "load"), CASES)
def test_an_answer_does_not_depend_on_the_load(name, load, folders, close_snapshots):
    args, wanted = LOADS[load], dict(enumerate(prompts()))
    dtype = {"dtype": args.get("dtype", "float32")}
    core = open_core(folders(name), enable_prefix_caching=False, **dtype)
    alone = {handle: run(core, {handle: ids})[handle] for handle, ids in wanted.items()}
    core = open_core(folders(name), **args)
    assert run(core, wanted, PREEMPTED_AFTER if load == "preempted" else ()) == alone
    hits = core.scheduler.counters.prefix_hits
    assert run(core, dict(reversed(wanted.items()))) == alone
    assert core.scheduler.counters.prefix_hits > hits


def test_a_snapshot_of_one_token_later_is_noticed(folders, close_snapshots, monkeypatch):
    wanted, real = dict(enumerate(prompts())), StateBlocks._ends
    expected = run(open_core(folders("qwen3_5")), wanted)

    def late(self, request, after):
        return [end + 1 for end in real(self, request, after) if end + 1 < request.num_tokens]

    monkeypatch.setattr(StateBlocks, "_ends", late)
    core = open_core(folders("qwen3_5"))
    run(core, wanted)
    assert run(core, wanted) != expected
    assert core.scheduler.counters.prefix_hits > 0


@pytest.mark.full
@pytest.mark.anyio
async def test_a_stream_goes_on_with_the_same_tokens_after_its_core_has_died(folders):
    args = EngineArgs(
        model=str(folders("qwen3_5")), skip_tokenizer_init=True, dtype="bfloat16", block_size=4,
        max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=80, cpu_threads=1,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(args)
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    prompt = {"prompt_token_ids": prompts()[6]}
    is_dead = False

    async def ids(name, *, kills):
        nonlocal is_dead
        found = []
        async for output in engine.generate(prompt, params, name):
            found += output.outputs[0].token_ids
            if kills and len(found) >= 6 and not is_dead:
                is_dead = True
                os.kill(engine.front_end.client.core_status(0).pid, signal.SIGKILL)
        return found

    try:
        expected = await ids("alone", kills=False)
        crowd = [ids(str(i), kills=i == 0) for i in range(3)]
        assert await asyncio.wait_for(asyncio.gather(*crowd), 120) == [expected] * 3
        assert is_dead and len(expected) == 30
    finally:
        engine.shutdown()
