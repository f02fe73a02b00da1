"""Streams of a crowd with every parameter, with drafts, in an engine that is disturbed: others are
aborted, the core is killed, it pauses, sleeps or forgets its cache. What comes is what an engine
without drafts gives in peace.
"""

import asyncio
import os
import signal

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, embedded
from quire.hardware.native import find_native
from quire.params import RequestOutputKind
from tests.speculation.crowd import MARKS, PROMPTS, answers, crowd

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=REASON)

K = 5
ENGINE = {"max_model_len": 160, "max_num_seqs": 16, "reasoning_config": MARKS, "block_size": 8}
METHODS = {
    "ngram": {"prompt_lookup_min": 1},
    "suffix": {"suffix_decoding_min_token_prob": 0.0},
    "draft_model": {"model": str(embedded.path())},
    "eagle3": {"model": str(embedded.draft_head())},
}
DEFAULT = (("kill", "ngram"), ("sleep", "draft_model"))


def requests():
    """Those with one completion, half of which have several tokens in a delta."""
    pairs = zip(*crowd(max_tokens=60), strict=True)
    return [(prompt, params) for prompt, params in pairs if params.n == 1]


@pytest.fixture(scope="module")
def right():
    with LLM(**ENGINE) as llm:
        outputs = llm.generate(*map(list, zip(*requests(), strict=True)), use_tqdm=False)
    return [whole(output.outputs[0].token_ids, output) for output in outputs]


def whole(ids, output):
    [_, (_, logprobs, text, reason, stop, _)] = answers([output])
    return list(ids), logprobs or None, text, reason, stop


class Crowd:
    """The streams, and how many tokens they have got."""

    def __init__(self, engine):
        self.engine = engine
        self.num_tokens = self.num_accepted = 0
        self.is_done = False

    async def stream(self, name, prompt, params):
        params = params.clone()
        params.output_kind = RequestOutputKind.DELTA
        params.stream_interval = 5 if name % 2 else None
        ids, logprobs, text = [], [], ""
        async for output in self.engine.generate(prompt, params, str(name)):
            [new] = output.outputs
            delta = whole(new.token_ids, output)
            ids, text = ids + delta[0], text + delta[2]
            logprobs += delta[1] or []
            self.num_tokens += len(delta[0])
        self.num_accepted += sum(new.spec_decode_metrics.per_step_accepted)
        return ids, logprobs or None, text, *delta[3:]

    async def leave_early(self, name):
        """A stream whose client goes away."""
        num_tokens = 0
        params = SamplingParams(
            max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.DELTA, seed=name
        )
        async for output in self.engine.generate(PROMPTS[name % 3], params, f"gone-{name}"):
            num_tokens += len(output.outputs[0].token_ids)
            if num_tokens > 4 + name:
                break

    async def disturb(self, how):
        """Five times, when so many tokens more have come."""
        for times in range(5):
            while self.num_tokens < 60 + times * 150:
                if self.is_done:
                    return
                await asyncio.sleep(0.005)
            await getattr(self, how)(times)

    async def abort(self, times):
        await asyncio.gather(*(self.leave_early(3 * times + i) for i in range(3)))

    async def kill(self, times):
        if times == 1:
            os.kill(self.engine.front_end.client.core_status(0).pid, signal.SIGKILL)

    async def pause(self, times):
        await self.engine.pause_generation(mode="keep")
        await self.engine.resume_generation()

    async def sleep(self, times):
        await self.engine.pause_generation(mode="keep")
        await self.engine.sleep(level=1 + times % 2, mode="keep")
        await self.engine.wake_up()
        await self.engine.resume_generation()

    async def forget(self, times):
        await self.engine.reset_prefix_cache(True)


@pytest.mark.anyio
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["abort", "kill", "pause", "sleep", "forget"])
@pytest.mark.sharp(when=lambda how, method: (how, method) in DEFAULT)
async def test_streams_of_a_disturbed_engine(how, method, right):
    config = {"method": method, "num_speculative_tokens": K} | METHODS[method]
    config["num_speculative_tokens_per_batch_size"] = [[1, 99, K]]
    args = AsyncEngineArgs(
        **ENGINE, speculative_config=config, enable_sleep_mode=True,
        per_request_spec_decode_metrics="detailed",
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(args)
    try:
        streams = Crowd(engine)
        disturbing = asyncio.create_task(streams.disturb(how))
        given = enumerate(requests())
        coming = asyncio.gather(*(streams.stream(name, *each) for name, each in given))
        found = await asyncio.wait_for(coming, 150)
        streams.is_done = True
        await disturbing
    finally:
        engine.shutdown()
    assert found == right
    assert streams.num_accepted > 100
