"""What the processes of an engine hold, sampled while a benchmark runs."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field

import psutil

from quire.engine.async_llm import AsyncLLM


@dataclass(frozen=True)
class Sample:
    """All processes together, and of the memory this one's part; `at_s` in seconds."""

    at_s: float
    resident_bytes: int
    front_end_bytes: int
    num_files: int
    num_threads: int
    num_tasks: int


@dataclass
class ProcessFigures:
    """Samples this process and the engine's cores every `period_s` until it is cancelled."""

    engine: AsyncLLM
    period_s: float = 1.0
    samples: list[Sample] = field(default_factory=list)
    asleep: list[Sample] = field(default_factory=list)
    _start: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Sample."""
        while True:
            self.samples.append(self._sample())
            await asyncio.sleep(self.period_s)

    def note_asleep(self) -> None:
        """Sample while the engine's KV memory is given back: what is left should not grow."""
        self.asleep.append(self._sample())

    def slope(self, name: str, *, is_asleep: bool = False, skipped_share: float = 1 / 3) -> float:
        """How fast a figure grows per minute: Theil and Sen's estimate (the median of all pairs'
        slopes), without the first share of the samples.
        """
        samples = self.asleep if is_asleep else self.samples
        kept = samples[int(len(samples) * skipped_share) :]
        kept = kept[:: max(1, len(kept) // 400)]
        pairs = [
            (getattr(late, name) - getattr(early, name)) / (late.at_s - early.at_s)
            for place, late in enumerate(kept)
            for early in kept[:place]
        ]
        return 60 * statistics.median(pairs) if pairs else 0.0

    def most(self, name: str) -> int:
        """The largest value."""
        return max(getattr(sample, name) for sample in self.samples)

    def _sample(self) -> Sample:
        client = self.engine.front_end.client
        pids = {client.core_status(index).pid for index in client.engine_indices}
        processes = [psutil.Process(), *(psutil.Process(pid) for pid in pids)]
        return Sample(
            time.monotonic() - self._start,
            sum(process.memory_info().rss for process in processes),
            processes[0].memory_info().rss,
            sum(process.num_fds() for process in processes),
            sum(process.num_threads() for process in processes),
            len(asyncio.all_tasks()),
        )
