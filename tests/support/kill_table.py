"""Parts of an engine killed or stopped at random moments under concurrent streams, and what the
streams notice.

`python -m benchmarks.kill_table` prints the table; the tests run single moments of it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from quire.config.args.engine_args import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.client.multiprocess import AsyncMPClient
from quire.engine.frontend.frontend import build_front_end
from quire.engine.launcher import start
from quire.engine.wire.messages import EngineCoreOutputs
from quire.params import RequestOutputKind, SamplingParams
from quire.testing.checkpoints import make_checkpoint

NUM_STREAMS = 64
NUM_TOKENS = 48
PROMPTS = ("def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self", "x = [")
POISON_AT = 20
_WAIT_S = 30.0
SETTINGS: dict[str, Any] = {}
"""Engine arguments in addition, for devices whose bits depend on the batch by default."""

Answer = tuple[list[int], str | None]
"""A stream's ids, and why it ended."""


class WatchedClient(AsyncMPClient):
    """Notes when the first token after a core's restart comes."""

    resumed_at: float | None = None
    _watched = -1
    _num_before = 0

    def watch(self, engine_index: int) -> None:
        self.resumed_at, self._watched, self._num_before = None, engine_index, self.num_restarts

    async def get_output(self) -> EngineCoreOutputs:
        outputs = await super().get_output()
        is_it = outputs.handles and outputs.engine_index == self._watched
        if is_it and self.num_restarts > self._num_before and self.resumed_at is None:
            self.resumed_at = time.monotonic()
        return outputs


@dataclass(slots=True)
class Row:
    """One kind of victim: what came of its moments. `resumed_s` are the seconds from the signal to
    the first token of the victim's next life.
    """

    victim: str
    resumed_s: list[float] = field(default_factory=list)
    num_moments: int = 0
    num_right: int = 0
    num_wrong: int = 0
    num_failed: int = 0
    num_restarts: int = 0
    leaks: list[str] = field(default_factory=list)

    def cells(self) -> Iterator[str]:
        yield self.victim
        yield str(self.num_moments)
        yield str(self.num_right)
        yield str(self.num_wrong)
        yield str(self.num_failed)
        yield str(self.num_restarts)
        times = self.resumed_s
        yield f"{statistics.median(times):.2f} / {max(times):.2f}" if times else "-"
        yield ", ".join(self.leaks) or "none"


TITLES = (
    *("victim", "moments", "streams right", "wrong", "failed", "restarts"),
    *("resumed after (s, median / worst)", "left behind"),
)


class Streams:
    """An engine with its cores, and a crowd of streams whose right answers are known."""

    def __init__(self, num_cores: int = 1, experts_in: Path | None = None, **sizes: int) -> None:
        """`experts_in`: a folder with a model whose experts the cores share; None: the embedded
        model. `sizes` of the ranks that a core's model has, and what else they differ in.
        """
        args = EngineArgs(
            model=None if experts_in is None else str(experts_in),
            enable_expert_parallel=experts_in is not None,
            max_num_seqs=NUM_STREAMS + 1,
            max_model_len=512,
            num_gpu_blocks_override=2000,
            seed=3,
            data_parallel_size=num_cores,
            logits_processors=["tests.support.poison:Poison"],
            **SETTINGS,
            **sizes,
        )
        plan = args.create_engine_config()
        self.num_cores = num_cores
        self.client = WatchedClient(start(plan), plan.parallel.max_core_restarts)
        self.client.wait_until_ready()
        front_end: Any = build_front_end(plan, self.client)
        self.engine = AsyncLLM(plan, front_end=front_end, log_requests=False)
        self._num_tokens = 0
        self._due: list[tuple[int, Callable[[], None]]] = []

    def pids(self) -> list[int]:
        return [self.client.core_status(index).pid for index in self.client.engine_indices]

    async def run(self, poisonous: int | None = None, harm: str = "poison_at") -> list[Answer]:
        """Serve the crowd; one of it may be poisonous."""
        self._num_tokens = 0
        return await asyncio.gather(
            *(
                self._stream(index, harm if index == poisonous else None)
                for index in range(NUM_STREAMS)
            )
        )

    def at(self, num_tokens: int, what: Callable[[], None]) -> None:
        """Do this when the crowd has had so many tokens."""
        self._due.append((num_tokens, what))

    async def ask(self, core: int, index: int) -> Answer:
        """Stream `index` once more, beside the crowd, of this core and no other."""
        return await self._stream(index, None, core)

    async def _stream(self, index: int, harm: str | None, core: int | None = None) -> Answer:
        ids: list[int] = []
        reason = None
        params = _params(index)
        if harm is not None:
            params.extra_args = {harm: POISON_AT}
        prompt = PROMPTS[index % len(PROMPTS)]
        name = str(index) if core is None else f"{index} of core {core}"
        async for output in self.engine.generate(prompt, params, name, data_parallel_rank=core):
            ids += output.outputs[0].token_ids
            reason = output.outputs[0].finish_reason
            self._num_tokens += len(output.outputs[0].token_ids)  # an output may have several
            while self._due and self._due[0][0] <= self._num_tokens:
                self._due.pop(0)[1]()
        return ids, reason


def _params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if index % 3 == 0 else 0.9,
        repetition_penalty=1.1 if index % 3 == 1 else 1.0,
        seed=index,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


async def _strike(
    row: Row,
    streams: Streams,
    pick: random.Random,
    num_moments: int,
    victim: Callable[[int], int],
    how: signal.Signals,
) -> None:
    """Send a signal to `victim(core)` for a core and at a moment that `pick` draws, so many times,
    each under a new crowd.

    The core may have no stream left at that moment (where it is faster than another), so one is
    asked of it behind the signal.
    """
    expected = await streams.run()
    for _ in range(num_moments):
        index = pick.randrange(streams.num_cores)
        sent: list[float] = []
        asked: list[asyncio.Task[Answer]] = []

        def strike(
            index: int = index,
            sent: list[float] = sent,
            asked: list[asyncio.Task[Answer]] = asked,
        ) -> None:
            streams.client.watch(index)
            sent.append(time.monotonic())
            os.kill(victim(index), how)
            asked.append(asyncio.create_task(streams.ask(index, 0)))

        streams.at(1 + pick.randrange(NUM_STREAMS * (NUM_TOKENS - 8)), strike)
        _count(row, await streams.run(), expected)
        row.num_wrong += await asked[0] != expected[0]
        if streams.client.resumed_at is not None:
            row.resumed_s.append(streams.client.resumed_at - sent[0])
    await _finish(row, streams)


async def signal_cores(
    how: signal.Signals, num_moments: int, *, num_cores: int = 1, seed: int = 0
) -> Row:
    """Send a signal to a core at random moments, each under a new crowd."""
    pick = random.Random(seed)
    which = "the core" if num_cores == 1 else f"one of {num_cores} cores"
    row = Row(f"{which}, {how.name}")
    with _no_leaks(row):
        streams = Streams(num_cores)
        await _strike(
            row,
            streams,
            pick,
            num_moments,
            lambda index: streams.client.core_status(index).pid,
            how,
        )
    return row


async def signal_ranks(
    how: signal.Signals,
    num_moments: int,
    *,
    shares_experts: bool = False,
    seed: int = 0,
    **sizes: int,
) -> Row:
    """Send a signal to a rank of the core's model, another one each time, at random moments.
    shares_experts: the core is one of two that share experts.
    """
    pick = random.Random(seed)
    words = ", ".join(
        name if size is True else f"{name.split('_')[0]} {size}" for name, size in sizes.items()
    )
    whose = f"{words} of one of 2 that share experts" if shares_experts else words
    row = Row(f"a rank of {whose}, {how.name}")
    with _no_leaks(row), tempfile.TemporaryDirectory() as folder:
        made = None
        if shares_experts:
            made = make_checkpoint(folder, "tiny", "qwen3_moe", dtype="float32")
        streams = Streams(2 if shares_experts else 1, made, **sizes)

        def victim(index: int) -> int:
            return _rank_of(streams.client.core_status(index).pid, pick)

        await _strike(row, streams, pick, num_moments, victim, how)
    return row


def _rank_of(core: int, pick: random.Random) -> int:
    """The process of a rank of a core."""
    children = psutil.Process(core).children()
    ranks = [each for each in children if each.name().startswith("QuireWorker-")]
    ranks.sort(key=lambda each: each.name())
    return ranks[pick.randrange(len(ranks))].pid


async def kill_one_that_shares_experts(
    num_moments: int, *, coordinator: bool = False, seed: int = 0
) -> Row:
    """Kill one of two cores that share experts, or their coordinator, at random moments."""
    pick = random.Random(seed)
    row = Row("the coordinator, SIGKILL" if coordinator else "one of 2 that share experts, SIGKILL")
    with _no_leaks(row), tempfile.TemporaryDirectory() as folder:
        streams = Streams(2, make_checkpoint(folder, "tiny", "qwen3_moe", dtype="float32"))

        def victim(index: int) -> int:
            found = streams.client.remote.coordinator
            assert found is not None, "cores that share experts have one"
            return found.pid if coordinator else streams.client.core_status(index).pid

        await _strike(row, streams, pick, num_moments, victim, signal.SIGKILL)
    return row


async def stop_front_end(num_moments: int, *, stopped_s: float = 2.0, seed: int = 0) -> Row:
    """Stop this process for a while at random moments; the cores go on."""
    pick = random.Random(seed)
    row = Row(f"the front end, SIGSTOP for {stopped_s:g} s")
    with _no_leaks(row):
        streams = Streams()
        expected = await streams.run()
        script = f"kill -STOP {os.getpid()}; sleep {stopped_s}; kill -CONT {os.getpid()}"
        for _ in range(num_moments):
            stoppers: list[subprocess.Popen[bytes]] = []

            def strike(stoppers: list[subprocess.Popen[bytes]] = stoppers) -> None:
                stoppers.append(subprocess.Popen(["sh", "-c", script]))

            streams.at(1 + pick.randrange(NUM_STREAMS * (NUM_TOKENS - 8)), strike)
            _count(row, await streams.run(), expected)
            await asyncio.to_thread(stoppers[0].wait, 30)
        await _finish(row, streams)
    return row


async def poison(num_moments: int, *, seed: int = 0, harm: str = "poison_at") -> Row:
    """One request of the crowd harms its core (tests/support/poison.py) at its POISON_AT-th id."""
    pick = random.Random(seed)
    row = Row("a poisonous request among the streams")
    with _no_leaks(row):
        streams = Streams()
        expected = await streams.run()
        for _ in range(num_moments):
            guilty = pick.randrange(NUM_STREAMS)
            right = list(expected)
            right[guilty] = right[guilty][0][:POISON_AT], "error"
            start = time.monotonic()
            _count(row, await streams.run(guilty, harm), right)
            row.resumed_s.append(time.monotonic() - start)
        await _finish(row, streams)
    return row


def kill_front_end(num_moments: int, *, seed: int = 0) -> Row:
    """Kill a front end in a process of its own; `resumed_s` is how long its core outlives it."""
    pick = random.Random(seed)
    row = Row("the front end, SIGKILL (core gone after)")
    with _no_leaks(row):
        for _ in range(num_moments):
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.support.kill_table"], stdout=subprocess.PIPE
            )
            assert child.stdout is not None
            cores = [psutil.Process(int(pid)) for pid in child.stdout.readline().split()]
            time.sleep(pick.random())
            child.kill()
            start = time.monotonic()
            _, alive = psutil.wait_procs(cores, timeout=_WAIT_S)
            row.resumed_s.append(time.monotonic() - start)
            row.leaks += [f"core {process.pid}" for process in alive]
            child.wait()
            child.stdout.close()
            row.num_moments += 1
    return row


def _count(row: Row, found: list[Answer], expected: list[Answer]) -> None:
    row.num_moments += 1
    for (ids, reason), (right, right_reason) in zip(found, expected, strict=True):
        if (ids, reason) == (right, right_reason):
            row.num_right += 1
        elif ids == right[: len(ids)] and reason == "error":
            row.num_failed += 1
        else:
            row.num_wrong += 1


async def _finish(row: Row, streams: Streams) -> None:
    if not await streams.engine.reset_prefix_cache():
        row.leaks.append("blocks")
    row.num_restarts = streams.client.num_restarts
    streams.engine.shutdown()


class _no_leaks:
    """Notes processes, shared memory and socket folders that are there behind it and were not
    before.
    """

    def __init__(self, row: Row) -> None:
        self._row = row

    def __enter__(self) -> None:
        self._before = _things()

    def __exit__(self, *exc: object) -> None:
        deadline = time.monotonic() + _WAIT_S
        while (left := _things() - self._before) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._row.leaks += sorted(left)


def _things() -> set[str]:
    children = psutil.Process().children(recursive=True)
    found = {f"process {child.pid}" for child in children if child.status() != "zombie"}
    found |= {path for path in map(str, Path("/dev/shm").glob("*")) if not _is_mapped(path)}
    pids = {os.getpid(), *(child.pid for child in children)}
    folders = Path(tempfile.gettempdir()).glob("quire-sockets-*-*")
    return found | {str(path) for path in folders if int(path.name.split("-")[2]) in pids}


def _is_mapped(path: str) -> bool:
    """Whether a living process has it, others at work on this machine for example."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if path in maps.read_text():
                return True
    return False


async def _serve_for_ever() -> None:
    streams = Streams()
    print(*streams.pids(), flush=True)  # noqa: T201 (the parent process reads it)
    while True:
        await streams.run()


if __name__ == "__main__":
    asyncio.run(_serve_for_ever())
