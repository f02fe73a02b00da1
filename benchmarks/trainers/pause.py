"""The time of a stream's gap around a weight update: python pause.py [SHAPE].

An engine of SHAPE (0.6b) streams a request while a trainer pauses it with `mode="keep"`, replaces
all weights from shared memory, and resumes it, five times with the K/V of before and five times
with a cleared cache, where the stream's tokens are computed again. A line has medians: seconds of
the pause, of the update, from the resumption to the next token, and between the two tokens.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from update_speed import FileSource

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.distributed.shared_buffer import handle_of
from quire.testing import make_checkpoint
from quire.trainers.sources import described

TIMES = 5
PROMPT = [3 + i % 1000 for i in range(512)]


class Stream:
    """A request that goes on, and when its tokens came."""

    def __init__(self, engine: AsyncLLM, name: str) -> None:
        self._tokens = asyncio.Condition()
        self.last_s = 0.0
        self._task = asyncio.create_task(self._run(engine, name))

    async def _run(self, engine: AsyncLLM, name: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
        async for _ in engine.generate({"prompt_token_ids": PROMPT}, params, name):
            async with self._tokens:
                self.last_s = time.perf_counter()
                self._tokens.notify_all()

    async def next(self, count: int = 1) -> None:
        """Wait for tokens."""
        for _ in range(count):
            async with self._tokens:
                await self._tokens.wait()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def measure(engine: AsyncLLM, info: dict[str, Any], clears: bool) -> dict[str, float]:
    """Medians of the parts of a gap, in seconds."""
    found: list[list[float]] = []
    for turn in range(TIMES + 1):
        stream = Stream(engine, f"{clears} {turn}")
        await stream.next(8)
        marks = [time.perf_counter()]
        await engine.pause_generation(mode="keep", clear_cache=clears)
        marks.append(time.perf_counter())
        before = stream.last_s
        await engine.start_weight_update()
        await engine.update_weights({"update_info": info})
        await engine.finish_weight_update(f"{clears} {turn}")
        marks.append(time.perf_counter())
        await engine.resume_generation()
        await stream.next()
        parts = [end - start for start, end in pairwise([*marks, stream.last_s])]
        found.append([*parts, stream.last_s - before])
        await stream.close()
    names = ("pause_s", "update_s", "first_token_s", "gap_s")
    columns = zip(*found[1:], strict=True)  # the first one touches the trainer's pages
    return {name: round(median(each), 3) for name, each in zip(names, columns, strict=True)}


async def main() -> int:
    """Print the lines."""
    with tempfile.TemporaryDirectory() as base:
        folder = make_checkpoint(Path(base) / "model", *sys.argv[1:2] or ["0.6b"])
        source = FileSource(folder)
        buffer = source.share()
        info = described(source.metadata()) | {"ipc_handles": [handle_of(t) for _, t in source]}
        for quantization in (None, "int8"):
            engine = AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    str(folder), skip_tokenizer_init=True, max_model_len=4096,
                    kv_cache_memory_bytes=1 << 30, quantization=quantization,
                    packed_weights_gib=0, weight_transfer_config={"backend": "ipc"},
                )
            )  # fmt: skip
            await engine.init_weight_transfer_engine({"init_info": {}})
            for clears in (False, True):
                line = await measure(engine, info, clears)
                print(quantization or "bfloat16", "cleared" if clears else "kept", line, flush=True)
            engine.shutdown()
        buffer.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
