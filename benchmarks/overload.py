"""Five times as many requests as the engine can serve: does it say no early and lose nothing?

First the capacity: as many streams as there are rows, for a while. Then requests arrive at random
times at `--factor` times that rate, and those that are refused go away. Then one request after the
other, until they are served as quickly as before the flood.

    PYTHONPATH=src python benchmarks/overload.py --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field

from process_figures import ProcessFigures

from quire.bench.report import add_output_flag, conclude, percentile
from quire.config.args.engine_args import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.event_loop import freeze_start_up, loop_factory
from quire.errors import CapacityError
from quire.params import RequestOutputKind, SamplingParams

MOST_REJECTION_S = 0.020
LEAST_GOODPUT = 0.90
MOST_GROWTH_BYTES_PER_MINUTE = 16 << 20
MOST_RECOVERY_S = 5.0


@dataclass
class Tally:
    """What happened to the requests of a phase."""

    num_arrived: int = 0
    num_served: int = 0
    rejection_s: list[float] = field(default_factory=list)
    deciding_s: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


class Load:
    """Sends requests of one size with random prompts."""

    def __init__(self, engine: AsyncLLM, args: argparse.Namespace) -> None:
        self._engine = engine
        self._draw = random.Random(7)
        self._input_len = args.input_len
        self._vocab = engine.front_end.inputs.limits.vocab_size
        self._params = SamplingParams(
            max_tokens=args.output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._num_sent = 0

    async def send(self, due: float, tally: Tally) -> None:
        """One request that was due at a moment (monotonic), from which its times count."""
        ids = [self._draw.randrange(self._vocab) for _ in range(self._input_len)]
        self._num_sent += 1
        tally.num_arrived += 1
        is_first = True
        start = time.monotonic()
        try:
            stream = self._engine.generate(ids, self._params, f"{self._num_sent}")
            async for _ in stream:
                if is_first:
                    is_first = False
                    tally.first_token_s.append(time.monotonic() - due)
        except CapacityError as error:
            tally.deciding_s.append(time.monotonic() - start)
            tally.rejection_s.append(time.monotonic() - due)
            tally.retry_after_s.append(error.retry_after_s or 0.0)
            return
        tally.num_served += 1

    async def closed(self, num_streams: int, seconds: float) -> Tally:
        """So many streams, each with one request after the other."""
        tally = Tally()
        end = time.monotonic() + seconds

        async def stream() -> None:
            while time.monotonic() < end:
                await self.send(time.monotonic(), tally)

        await asyncio.gather(*(stream() for _ in range(num_streams)))
        return tally

    async def flood(self, rate: float, seconds: float) -> tuple[Tally, int]:
        """Poisson arrivals; the tally, once all have ended, and how many were served in time."""
        tally, tasks = Tally(), set()
        due = time.monotonic()
        end = due + seconds
        while due < end:
            due += self._draw.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self.send(due, tally))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        in_time = tally.num_served
        return tally, in_time


async def recovery(load: Load, usual_s: float) -> float:
    """Seconds until a request has its first token within twice the usual time."""
    start = time.monotonic()
    while True:
        tally = Tally()
        await load.send(time.monotonic(), tally)
        if tally.first_token_s and tally.first_token_s[0] <= max(2 * usual_s, 0.05):
            return time.monotonic() - start
        await asyncio.sleep(0.05)


async def measure(engine: AsyncLLM, args: argparse.Namespace) -> dict[str, float]:
    """All three phases."""
    load = Load(engine, args)
    await load.closed(args.num_rows, 2.0)
    alone = Tally()
    for _ in range(10):
        await load.send(time.monotonic(), alone)
    usual_s = percentile(alone.first_token_s, 50)
    start = time.monotonic()
    served = (await load.closed(args.num_rows, args.capacity_seconds)).num_served
    capacity = served / (time.monotonic() - start)
    figures = ProcessFigures(engine)
    sampler = asyncio.create_task(figures.run())
    start = time.monotonic()
    tally, in_time = await load.flood(args.factor * capacity, args.seconds)
    elapsed = time.monotonic() - start
    sampler.cancel()
    recovered = await recovery(load, usual_s)
    await engine.wait_for_requests_to_drain(60)
    return {
        "capacity_requests_per_s": capacity,
        "offered_requests_per_s": tally.num_arrived / elapsed,
        "goodput_share": in_time / elapsed / capacity,
        "num_rejected": len(tally.rejection_s),
        "rejection_p50_s": percentile(tally.rejection_s, 50),
        "rejection_p99_s": percentile(tally.rejection_s, 99),
        "rejection_max_s": max(tally.rejection_s),
        "rejection_without_the_wait_for_the_loop_p99_s": percentile(tally.deciding_s, 99),
        "retry_after_p50_s": percentile(tally.retry_after_s, 50),
        "resident_growth_bytes_per_minute": figures.slope("resident_bytes"),
        "resident_most_bytes": figures.most("resident_bytes"),
        "first_token_alone_s": usual_s,
        "recovery_s": recovered,
    }


def failures(figures: dict[str, float]) -> list[str]:
    """Which of the promises were not kept."""
    kept = {
        "rejections take longer than 20 ms": figures["rejection_p99_s"] < MOST_REJECTION_S,
        "goodput is below 90 % of the capacity": figures["goodput_share"] >= LEAST_GOODPUT,
        "memory grows": figures["resident_growth_bytes_per_minute"] < MOST_GROWTH_BYTES_PER_MINUTE,
        "recovery takes longer than 5 s": figures["recovery_s"] < MOST_RECOVERY_S,
    }
    return [text for text, is_kept in kept.items() if not is_kept]


async def run(args: argparse.Namespace) -> dict[str, float]:
    """On an engine of its own."""
    wishes = EngineArgs(
        model=args.model,
        max_num_seqs=args.num_rows,
        max_num_queued_reqs=args.most_unfinished or 2 * args.num_rows,
        kv_cache_memory_bytes=1 << 26,
    )
    engine = AsyncLLM.from_engine_args(wishes)
    freeze_start_up()  # as `quire serve` does
    try:
        return await measure(engine, args)
    finally:
        engine.shutdown()


def main() -> int:
    """Print the figures; exit code 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; default the embedded model")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the flood lasts")
    parser.add_argument("--capacity-seconds", type=float, default=15.0)
    parser.add_argument("--factor", type=float, default=5.0, help="arrivals per served request")
    parser.add_argument("--num-rows", type=int, default=32, help="requests that run at once")
    parser.add_argument("--most-unfinished", type=int, help="default: 2 * num-rows")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    add_output_flag(parser)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        figures = runner.run(run(args))
    return conclude(figures, failures(figures), args.output_json)


if __name__ == "__main__":
    sys.exit(main())
