"""The same tokens and log-probabilities with drafts where a request's life is not a straight line:
its prompt comes in parts, or it is preempted with a recurrent state that goes back over wrong
drafts.
"""

import asyncio

import pytest

from quire import AsyncLLM, EngineArgs, SamplingParams, embedded
from quire.engine.client.inproc import build_client
from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.engine.frontend.frontend import build_front_end
from quire.engine.frontend.streaming_input import StreamingInput
from quire.engine.wire.messages import EngineCoreRequest
from quire.hardware.native import find_native
from quire.params import RequestOutputKind
from quire.runner.drafting.drafting import Drafting
from quire.runner.drafting.pace import FixedPace
from quire.testing.loop_client import LoopClient
from tests.models.hostile.models import Library
from tests.speculation.crowd import PROMPTS
from tests.speculation.drafters import Recorder, Replay, Wild

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=REASON)

K = 3
ALWAYS = {"num_speculative_tokens": K, "num_speculative_tokens_per_batch_size": [[1, 99, K]]}
DRAFTS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0},
    "draft_model": {"method": "draft_model", "model": str(embedded.path())},
    "eagle3": {"method": "eagle3", "model": str(embedded.draft_head())},
}
STOPS = list(range(40, 90))
PARTS = [
    (PROMPTS[0], {"temperature": 0.0, "max_tokens": 17}),
    (PROMPTS[2], {"temperature": 0.9, "max_tokens": 9, "stop_token_ids": STOPS}),
    ("\n", {"temperature": 0.0, "max_tokens": 1}),
    (PROMPTS[1], {"temperature": 1.0, "max_tokens": 25, "repetition_penalty": 1.2, "min_p": 0.02}),
    (PROMPTS[0], {"temperature": 0.0, "max_tokens": 21}),
]


async def session(engine, name, waits):
    """Ids, log-probabilities and ends of a request whose prompt comes in parts: each when the
    answer to the one before has come (`waits`), or all at once.
    """
    tokenizer, answered = engine.get_tokenizer(), asyncio.Semaphore(0)

    def params(wish):
        given = {"seed": 5, "ignore_eos": True, "logprobs": 1, "detokenize": False}
        return SamplingParams(**given, **wish, output_kind=RequestOutputKind.DELTA)

    async def parts():
        for text, wish in PARTS:
            yield StreamingInput(tokenizer.encode(text), params(wish))
            if waits:
                await answered.acquire()

    ids, logprobs, left = [], [], [wish["max_tokens"] for _, wish in PARTS]
    async for output in engine.generate(parts(), params(PARTS[0][1]), name):
        [new] = output.outputs
        ids += new.token_ids
        logprobs += new.logprobs or []
        left[0] -= len(new.token_ids)
        is_stopped = len(left) == len(PARTS) - 1 and new.token_ids[-1:] and ids[-1] in STOPS
        if left[0] == 0 or is_stopped:
            del left[0]
            answered.release()
            left = left or [-1]
    return ids, logprobs


def sessions(config, waits):
    """The answers of an engine, and the drafts that were right."""
    args = EngineArgs(
        dtype="float32", max_model_len=512, max_num_seqs=4, block_size=8,
        speculative_config=config, disable_log_stats=False,
    )  # fmt: skip
    plan = args.create_engine_config()

    async def run():
        inner = build_client(plan)
        client = LoopClient(inner, lambda: inner.engine_core.has_work)
        engine = AsyncLLM(plan, front_end=build_front_end(plan, client), log_requests=False)
        try:
            both = (session(engine, str(i), waits) for i in range(2))
            found = await asyncio.wait_for(asyncio.gather(*both), 120)
            accepted = sum(inner.engine_core.scheduler.counters.num_accepted[1:])
            return found, accepted
        finally:
            engine.shutdown()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def without_drafts():
    return {waits: sessions(None, waits)[0] for waits in (False, True)}


@pytest.mark.parametrize("waits", [False, True], ids=["at-once", "one-by-one"])
@pytest.mark.parametrize("method", DRAFTS)
def test_a_prompt_in_parts(method, waits, without_drafts):
    found, accepted = sessions(DRAFTS[method] | ALWAYS, waits)
    right = without_drafts[waits]
    assert found == right
    assert len(right[0][0]) >= 17 + 1 + 1 + 25 + 21 and accepted > 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = Library(tmp_path_factory.mktemp("made"))
    return lambda name: made[name].folder


def open_state_core(folder, *, drafts, depth=1):
    args = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", block_size=2, cpu_threads=2,
        max_model_len=64, max_num_seqs=6, max_num_batched_tokens=23, num_gpu_blocks_override=300,
        async_scheduling=depth == 2,
        speculative_config={"method": "ngram", **ALWAYS} if drafts else None,
    )  # fmt: skip
    return build_core(args.create_engine_config())


def watch(core, drafter):
    head = core.executor.worker.model_runner.heads.of(SamplingParams())
    head.drafting = Drafting(drafter, FixedPace(K))
    return drafter


def run(core, preempt_every=None):
    """Ids and log-probabilities of requests that come one after the other; all that run are
    preempted, and what is cached forgotten, every so many steps.
    """
    found, steps = {}, 0
    for handle in range(7):
        ids = [(11 * handle + 7 * i * i) % 90 + 3 for i in range((5, 1, 18, 9, 26, 2, 13)[handle])]
        params = SamplingParams(
            temperature=handle % 2, max_tokens=(9, 14)[handle % 2], ignore_eos=True, logprobs=0
        )
        core.add_request(EngineCoreRequest(handle, ids, params, seed=handle, arrival_time=0.0))
        found[handle] = []
    while core.has_work:
        steps += 1
        # Without an end, prompts might start over again and again.
        if preempt_every and steps % preempt_every == 0 and steps < 12 * preempt_every:
            perform(core, "reset_prefix_cache", (True,))
        out = core.step()
        values = None if out.logprobs is None else out.logprobs.values[:, 0].tolist()
        start = 0
        for handle, count in zip(out.handles, out.counts or [1] * len(out.handles), strict=True):
            for place in range(start, start + count):
                at = out.logprobs.index.index(place)
                found[handle].append((out.token_ids[place], values[at]))
            start += count
        assert all(str(end.reason) == "length" for end in out.finished), out.finished
    return found


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("mamba2", 1),
        ("qwen3_5", 1),
        pytest.param("qwen3_5", 2, marks=pytest.mark.full),
        pytest.param("mamba", 1, marks=pytest.mark.full),
        pytest.param("lfm2", 1, marks=pytest.mark.full),
        pytest.param("falcon_h1", 1, marks=pytest.mark.full),
    ],
)
def test_a_recurrent_state_goes_back_over_wrong_drafts(name, depth, folders):
    right = run(open_state_core(folders(name), drafts=False))
    assert run(open_state_core(folders(name), drafts=False), preempt_every=5) == right
    core = open_state_core(folders(name), drafts=True, depth=depth)
    recorder = watch(core, Recorder())
    assert run(core) == right
    for make_drafter, spoiled, preempt_every in (
        (Replay, 0.0, None), (Replay, 0.5, 5), (Replay, 0.3, 3), (Wild, 0.4, 7), (Replay, 1.0, 4),
    ):  # fmt: skip
        core = open_state_core(folders(name), drafts=True, depth=depth)
        drafter = watch(core, make_drafter(recorder.answers, spoiled=spoiled, vocab=93))
        assert run(core, preempt_every) == right
        assert run(core) == right, "prefix hits begin from snapshots of what was verified"
        assert drafter.num_drafted > 20
        assert drafter.num_accepted > 0 or spoiled == 1.0
        if preempt_every:
            assert core.scheduler.counters.num_preemptions > 0
