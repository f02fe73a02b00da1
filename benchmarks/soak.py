"""Hours of what callers do to an engine: does anything grow, does any answer change?

Streams are read to the end, left, cancelled, aborted and timed out; prompts stream in; the engine
sleeps, pauses, forgets its caches. Between all that a few greedy requests whose answers are known
are asked again. Open files, threads and tasks are sampled, memory where the KV cache is given back
(in between its pages come and go), and their slopes printed.

    PYTHONPATH=src python benchmarks/soak.py --minutes 30
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator

from process_figures import ProcessFigures

from quire.bench.report import add_output_flag, conclude
from quire.config.args.engine_args import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.frontend.streaming_input import StreamingInput
from quire.params import RequestOutputKind, SamplingParams

MOST_GROWTH_BYTES_PER_MINUTE = 1 << 20
MOST_GROWTH_PER_MINUTE = 0.5
"""Of open files, threads and tasks."""

KNOWN = ["def add(a, b):", "import os\n", "class Stack:\n    def push(self, item):"]


class Callers:
    """Concurrent callers, each of whom does one random thing after the other."""

    def __init__(self, engine: AsyncLLM, seed: int) -> None:
        self._engine = engine
        self._draw = random.Random(seed)
        self._vocab = engine.front_end.inputs.limits.vocab_size
        self._num_sent = 0
        self._right: dict[str, str | None] = {}
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def learn(self) -> None:
        """Note the answers to the known prompts."""
        for prompt in KNOWN:
            self._right[prompt] = await self._answer(prompt)

    async def call_until(self, end: float) -> None:
        """One caller."""
        ways = [self._read, self._leave, self._cancel, self._abort, self._time_out, self._stream]
        while time.monotonic() < end:
            way = self._draw.choice([*ways, self._ask_again])
            await way()
            self.done[way.__name__.strip("_")] += 1

    async def control_until(self, end: float, figures: ProcessFigures) -> None:
        """Now and then, do something to the engine as a whole."""
        engine = self._engine
        while time.monotonic() < end:
            await asyncio.sleep(self._draw.uniform(0.5, 3.0))
            what = self._draw.choice(["sleep", "pause", "reset"])
            if what == "sleep":
                level = self._draw.choice([0, 1, 2])
                await engine.sleep(level, self._draw.choice(["abort", "keep"]))
                if level == 1:
                    figures.note_asleep()
                await engine.wake_up()
            elif what == "pause":
                await engine.pause_generation(self._draw.choice(["abort", "wait", "keep"]))
                await engine.resume_generation()
            else:
                await engine.reset_prefix_cache(reset_running_requests=True)
            self.done[what] += 1

    def _new_id(self) -> str:
        self._num_sent += 1
        return f"soak-{self._num_sent}"

    def _prompt(self) -> list[int]:
        return [self._draw.randrange(self._vocab) for _ in range(self._draw.randint(1, 200))]

    def _params(self) -> SamplingParams:
        draw = self._draw
        temperature = draw.choice([0.0, 0.7, 1.2])
        return SamplingParams(
            n=draw.choice([1, 1, 2]) if temperature else 1,
            temperature=temperature,
            top_p=draw.choice([1.0, 0.9]),
            presence_penalty=draw.choice([0.0, 0.5]),
            logprobs=draw.choice([None, None, 3]),
            stop=draw.choice([None, ["\n"]]),
            max_tokens=draw.randint(1, 64),
            output_kind=draw.choice(list(RequestOutputKind)),
        )

    async def _read(self) -> None:
        async for _ in self._engine.generate(self._prompt(), self._params(), self._new_id()):
            pass

    async def _leave(self) -> None:
        stream = self._engine.generate(self._prompt(), self._params(), self._new_id())
        for _ in range(self._draw.randint(1, 4)):
            if await anext(stream, None) is None:
                break
        await stream.aclose()

    async def _cancel(self) -> None:
        task = asyncio.create_task(self._read())
        await asyncio.sleep(self._draw.uniform(0, 0.05))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _abort(self) -> None:
        request_id = self._new_id()
        mailbox = await self._engine.add_request(request_id, self._prompt(), self._params())
        await asyncio.sleep(self._draw.uniform(0, 0.05))
        await self._engine.abort(request_id)
        while not (await mailbox.get()).finished:
            pass

    async def _time_out(self) -> None:
        seconds = self._draw.uniform(0.001, 0.1)
        stream = self._engine.generate(
            self._prompt(), self._params(), self._new_id(), timeout_s=seconds
        )
        async for _ in stream:
            pass

    async def _stream(self) -> None:
        async def parts() -> AsyncIterator[StreamingInput]:
            for _ in range(self._draw.randint(1, 3)):
                yield StreamingInput(self._prompt())

        params = SamplingParams(
            max_tokens=self._draw.randint(1, 16), output_kind=RequestOutputKind.DELTA
        )
        async for _ in self._engine.generate(parts(), params, self._new_id()):
            pass

    async def _ask_again(self) -> None:
        """An answer that was aborted by the control task says so; any other must be right."""
        prompt = self._draw.choice(KNOWN)
        found = await self._answer(prompt)
        if found is not None and found != self._right[prompt]:
            self.wrong.append(f"{prompt!r} -> {found!r}")

    async def _answer(self, prompt: str) -> str | None:
        params = SamplingParams(
            temperature=0.0, max_tokens=24, output_kind=RequestOutputKind.FINAL_ONLY
        )
        async for output in self._engine.generate(prompt, params, self._new_id()):
            completion = output.outputs[0]
        return None if completion.finish_reason == "abort" else completion.text


async def measure(engine: AsyncLLM, args: argparse.Namespace) -> dict[str, object]:
    """Let the callers loose."""
    callers = Callers(engine, args.seed)
    await callers.learn()
    figures = ProcessFigures(engine, period_s=max(1.0, args.minutes / 10))
    sampler = asyncio.create_task(figures.run())
    end = time.monotonic() + 60 * args.minutes
    await asyncio.gather(
        callers.control_until(end, figures), *(callers.call_until(end) for _ in range(args.callers))
    )
    await engine.wait_for_requests_to_drain(60)
    sampler.cancel()
    outputs = engine.front_end.outputs
    return {
        "minutes": args.minutes,
        "done": dict(callers.done),
        "wrong_answers": callers.wrong[:5],
        "unfinished": outputs.num_unfinished,
        "queued_tokens": outputs.num_queued_tokens,
        "resident_growth_bytes_per_minute": figures.slope("resident_bytes", is_asleep=True),
        "front_end_growth_bytes_per_minute": figures.slope("front_end_bytes"),
        "resident_most_bytes": figures.most("resident_bytes"),
        "asleep_mib": [round(s.resident_bytes / 2**20, 1) for s in figures.asleep],
        "front_end_mib": [round(s.front_end_bytes / 2**20, 1) for s in figures.samples[::10]],
        "files_per_minute": figures.slope("num_files"),
        "threads_per_minute": figures.slope("num_threads"),
        "tasks_per_minute": figures.slope("num_tasks"),
        "files_most": figures.most("num_files"),
        "threads_most": figures.most("num_threads"),
    }


def failures(figures: dict[str, object]) -> list[str]:
    """What should not be."""
    found = [
        f"{name} is {figures[name]:.3g}"
        for name in ("files_per_minute", "threads_per_minute", "tasks_per_minute")
        if float(str(figures[name])) > MOST_GROWTH_PER_MINUTE
    ]
    growth = float(str(figures["resident_growth_bytes_per_minute"]))
    if growth > MOST_GROWTH_BYTES_PER_MINUTE:
        found.append(f"memory grows by {growth / 2**20:.1f} MiB per minute")
    for name in ("wrong_answers", "unfinished", "queued_tokens"):
        if figures[name]:
            found.append(f"{name}: {figures[name]}")
    return found


async def run(args: argparse.Namespace) -> dict[str, object]:
    """On an engine of its own."""
    wishes = EngineArgs(model=args.model, max_num_seqs=32, kv_cache_memory_bytes=1 << 26)
    engine = AsyncLLM.from_engine_args(wishes)
    try:
        return await measure(engine, args)
    finally:
        engine.shutdown()


def main() -> int:
    """Print the figures; exit code 1 if something grew or an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; default the embedded model")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--callers", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    add_output_flag(parser)
    args = parser.parse_args()
    figures = asyncio.run(run(args))
    return conclude(figures, failures(figures), args.output_json)


if __name__ == "__main__":
    sys.exit(main())
