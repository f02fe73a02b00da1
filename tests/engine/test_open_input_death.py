"""A core that dies under a request whose input is still open: one clear error for it alone."""

import asyncio
import os
import signal

import pytest

from quire import AsyncLLM, EngineArgs, SamplingParams
from quire.engine.frontend.streaming_input import StreamingInput
from quire.params import RequestOutputKind

pytestmark = pytest.mark.slow


async def collected(stream, on_tokens=lambda num_tokens: None):
    """The ids of all outputs of a DELTA stream, and the last output's completion."""
    ids, last = [], None
    async for output in stream:
        last = output.outputs[0]
        ids += last.token_ids
        on_tokens(len(ids))
    return ids, last


@pytest.mark.anyio
@pytest.mark.full
async def test_a_streamed_prompt_ends_with_one_error_when_its_core_dies():
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    longer = params.clone()
    longer.max_tokens = 60
    args = EngineArgs(max_num_seqs=4, num_gpu_blocks_override=200, max_model_len=256)
    engine = AsyncLLM.from_engine_args(args)
    is_dead, was_closed = asyncio.Event(), []

    def kill(num_tokens):
        if num_tokens >= 4 and not is_dead.is_set():
            is_dead.set()
            os.kill(engine.front_end.client.core_status(0).pid, signal.SIGKILL)

    async def parts():
        try:
            yield StreamingInput([5, 6, 7])
            await asyncio.Event().wait()
        finally:
            was_closed.append(True)

    try:
        expected, _ = await collected(engine.generate([5, 6, 7], longer, "alone"))
        open_one = collected(engine.generate(parts(), params, "open"), kill)
        whole = collected(engine.generate([5, 6, 7], longer, "whole"))
        (ids, last), (others, end) = await asyncio.wait_for(asyncio.gather(open_one, whole), 120)
        assert last.finish_reason == "error"
        assert "input is still open cannot be resumed" in last.error
        assert ids == expected[: len(ids)]
        assert (others, end.finish_reason) == (expected, "length")
        assert engine.get_num_unfinished_requests() == 0
        while engine._feeders.running:  # its generator is left as soon as the loop comes to it
            await asyncio.sleep(0)
        assert was_closed == [True]
    finally:
        engine.shutdown()
