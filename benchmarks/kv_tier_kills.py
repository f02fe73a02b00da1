"""Cores that die, stop, or have a bad disk while streams run over a tier of K/V: the answers, what
was loaded, and what is left behind.

    PYTHONPATH=src:. python -m benchmarks.kv_tier_kills [--moments 10] [--streams 64] [--only WORD]

Every stream must end with the ids of an engine without a tier; after each moment no block may be
held. Where a core died, its next life must have loaded what the dead one had stored.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
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

_PROMPT, _OUTPUT, _BLOCK = 160, 48, 16
_WAIT_S = 60.0
_FULL_BYTES = 1 << 20
_HANGS_S = 8.0
"""Longer than loads wait for a file."""

Answer = tuple[list[int], str | None]
Harm = Callable[..., None]
"""An action upon a crowd; `where`: the folder of its files."""


class CountingClient(AsyncMPClient):
    """Sums the bytes that cores have loaded, and notes when the first token after a restart comes.

    The tokens of hits are counted once for each request, in its first life.
    """

    loaded = 0
    usage = 0.0
    resumed_at: float | None = None
    _counts_from = 0

    def watch(self, *, dies: bool) -> None:
        """From now on, or from the next life of a core that `dies`."""
        self.loaded, self.resumed_at = 0, None
        self._counts_from = self.num_restarts + dies

    async def get_output(self) -> EngineCoreOutputs:
        outputs = await super().get_output()
        counts = self.num_restarts >= self._counts_from
        if outputs.stats is not None:
            self.loaded += outputs.stats.kv_offload_load_bytes if counts else 0
            self.usage = outputs.stats.kv_cache_usage
        if outputs.handles and counts and self.resumed_at is None:
            self.resumed_at = time.monotonic()
        return outputs


class Crowd:
    """An engine with its core in a process, and streams of prompts that begin differently."""

    def __init__(
        self,
        num_streams: int,
        tier: dict[str, Any] | None,
        num_prompt_tokens: int = _PROMPT,
        **sizes: Any,
    ) -> None:
        options: dict[str, Any] = {"kv_transfer_config": tier, **sizes}
        length = num_prompt_tokens + _OUTPUT
        plan = EngineArgs(
            max_num_seqs=num_streams,
            max_model_len=length,
            block_size=_BLOCK,
            num_gpu_blocks_override=2 + num_streams * (-(-length // _BLOCK) + 1),
            seed=3,
            **options,
        ).create_engine_config()
        self.client = CountingClient(start(plan), plan.parallel.max_core_restarts)
        self.client.wait_until_ready()
        front_end: Any = build_front_end(plan, self.client)
        self.engine = AsyncLLM(plan, front_end=front_end, log_requests=False)
        draw = random.Random(7)
        self.prompts = [
            [draw.randrange(10, 250) for _ in range(num_prompt_tokens)] for _ in range(num_streams)
        ]
        self._num_tokens = self._num_rounds = 0
        self._due: tuple[int, Callable[[], None]] | None = None

    def core(self) -> psutil.Process:
        """The core's process."""
        return psutil.Process(self.client.core_status(0).pid)

    def at(self, num_tokens: int, what: Callable[[], None]) -> None:
        """Do this when the next round has had so many tokens."""
        self._due = num_tokens, what

    async def run(self) -> list[Answer]:
        """Serve all streams at once."""
        self._num_tokens, self._num_rounds = 0, self._num_rounds + 1
        return await asyncio.gather(*map(self._stream, range(len(self.prompts))))

    async def _stream(self, index: int) -> Answer:
        ids: list[int] = []
        reason = None
        params = SamplingParams(
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
            max_tokens=_OUTPUT,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: Any = {"prompt_token_ids": self.prompts[index]}
        name = f"{self._num_rounds}-{index}"
        async for output in self.engine.generate(prompt, params, name):
            ids += output.outputs[0].token_ids
            reason = output.outputs[0].finish_reason
            self._num_tokens += len(output.outputs[0].token_ids)
            if self._due is not None and self._due[0] <= self._num_tokens:
                (_, what), self._due = self._due, None
                what()
        return ids, reason

    async def usage(self) -> float:
        """The share of blocks that are held, once nothing runs."""
        end = time.monotonic() + _WAIT_S
        while self.client.usage and time.monotonic() < end:
            await asyncio.sleep(0.1)
            await self.engine.reset_prefix_cache()
            await self.ask_once()
        return self.client.usage

    async def ask_once(self) -> None:
        """One token more, with which counts come."""
        prompt: Any = {"prompt_token_ids": [9]}
        [answer async for answer in self.engine.generate(prompt, _ONE, "once")]


_ONE = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(slots=True)
class Row:
    """A kind of harm, and what came of its moments."""

    name: str
    num_moments: int = 0
    num_right: int = 0
    num_wrong: int = 0
    restarts: int = 0
    loaded: list[int] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    held: float = 0.0

    def cells(self) -> Iterator[str]:
        """The row of the table."""
        yield self.name
        yield from map(str, (self.num_moments, self.num_right, self.num_wrong, self.restarts))
        yield f"{min(self.loaded, default=0) / 2**20:.1f}"
        times = self.resumed_s
        yield f"{statistics.median(times):.2f} / {max(times):.2f}" if times else "-"
        yield f"{self.held:.1%}"


TITLES = (
    *("harm", "moments", "right", "wrong", "restarts", "least MiB loaded"),
    *("resumed after (s, median / worst)", "blocks held"),
)


def tier_of(folder: Path | None, host_bytes: int = 256 << 20) -> dict[str, Any]:
    """The option for host memory, and files in a folder."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
    if folder is not None:
        disk = {"type": "fs", "root_dir": str(folder), "capacity_bytes": 1 << 30}
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [disk]}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system that is soon full. Raises OSError where none can be mounted."""
    with tempfile.TemporaryDirectory() as name:
        words = ["mount", "-t", "tmpfs", "-o", f"size={_FULL_BYTES},mode=700", "kv", name]
        if subprocess.run(words, check=False, capture_output=True).returncode:
            raise OSError("a small file system cannot be mounted here")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=False)


@contextmanager
def own_disk() -> Iterator[Path]:
    """A file system of its own, which can be frozen. Raises OSError where none can be mounted."""
    with tempfile.TemporaryDirectory() as name:
        image, where = Path(name, "image"), Path(name, "mounted")
        where.mkdir()
        with image.open("wb") as file:
            file.truncate(256 << 20)
        for words in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, where]):
            if subprocess.run(words, check=False, capture_output=True).returncode:
                raise OSError("a file system in a file cannot be mounted here")
        (where / "lost+found").rmdir()
        try:
            yield where
        finally:
            subprocess.run(["fsfreeze", "-u", where], check=False, capture_output=True)
            subprocess.run(["umount", "-l", where], check=False)


def freeze(crowd: Crowd, where: Path) -> None:
    """Let whoever writes to a file system wait for some seconds, as a disk that hangs does."""
    subprocess.run(["fsfreeze", "-f", where], check=True)
    words = ["fsfreeze", "-u", str(where)]
    threading.Timer(_HANGS_S, subprocess.run, [words], {"check": True}).start()


def flip_files(folder: Path, pick: random.Random) -> None:
    """Damage half of the files: a bit is flipped, or the end is missing."""
    for file in folder.rglob("*.kv"):
        if pick.random() < 0.5:
            continue
        try:
            size = file.stat().st_size
            with file.open("r+b") as opened:
                if pick.random() < 0.5:
                    opened.truncate(pick.randrange(size))
                else:
                    opened.seek(pick.randrange(size))
                    byte = opened.read(1)[0]
                    opened.seek(-1, os.SEEK_CUR)
                    opened.write(bytes([byte ^ 1 << pick.randrange(8)]))
        except OSError:
            continue  # it was evicted meanwhile


async def strike(
    row: Row,
    crowd: Crowd,
    expected: list[Answer],
    moments: int,
    harm: Callable[[Crowd], None],
    *,
    dies: bool,
    seed: int,
) -> None:
    """Harm the engine at random moments, each under new streams over an empty pool."""
    pick = random.Random(seed)
    _count(row, await crowd.run(), expected)
    before = crowd.client.num_restarts
    for _ in range(moments):
        await crowd.engine.reset_prefix_cache()
        crowd.client.watch(dies=dies)
        sent: list[float] = []

        def now(sent: list[float] = sent) -> None:
            sent.append(time.monotonic())
            harm(crowd)

        crowd.at(1 + pick.randrange(len(crowd.prompts) * (_OUTPUT - 8)), now)
        _count(row, await crowd.run(), expected)
        row.num_moments += 1
        row.loaded.append(crowd.client.loaded)
        if dies and crowd.client.resumed_at is not None:
            row.resumed_s.append(crowd.client.resumed_at - sent[0])
    row.restarts = crowd.client.num_restarts - before
    row.held = max(row.held, await crowd.usage())


def _count(row: Row, found: list[Answer], expected: list[Answer]) -> None:
    right = sum(one == other for one, other in zip(found, expected, strict=True))
    row.num_right += right
    row.num_wrong += len(expected) - right


async def table(num_streams: int, moments: int, only: str = "", seed: int = 0) -> list[Row]:
    """All rows whose names have the word `only`."""
    plain = Crowd(num_streams, None, enable_prefix_caching=False)
    expected = await plain.run()
    plain.engine.shutdown()
    pick = random.Random(seed)

    def send(how: signal.Signals) -> Harm:
        return lambda crowd, where: crowd.core().send_signal(how)

    def send_to_rank(crowd: Crowd, where: Path) -> None:
        ranks = [each for each in crowd.core().children() if "QuireWorker" in each.name()]
        pick.choice(ranks).kill()

    def damage(crowd: Crowd, where: Path) -> None:
        core = crowd.core()
        core.suspend()  # or it would have answered by then
        flip_files(where, pick)
        core.kill()

    rows: list[Row] = []
    memory, folder, kill = nullcontext, tempfile.TemporaryDirectory, send(signal.SIGKILL)
    harms: list[tuple[str, Callable[[], Any], Harm, bool, dict[str, Any]]] = [
        ("core SIGKILL, memory alone", memory, kill, True, {}),
        ("core SIGKILL, memory and files", folder, kill, True, {}),
        ("core SIGSTOP, memory alone", memory, send(signal.SIGSTOP), True, {}),
        ("no tier, core SIGKILL", memory, kill, True, {}),
        ("rank SIGKILL, tp 2", memory, send_to_rank, True, {"tensor_parallel_size": 2}),
        ("rank SIGKILL, pp 2", memory, send_to_rank, True, {"pipeline_parallel_size": 2}),
        ("disk full", small_disk, lambda crowd, where: None, False, {}),
        ("disk hangs, little memory", own_disk, freeze, False, {}),
        ("files damaged, core SIGKILL", folder, damage, True, {}),
    ]
    for name, place, harm, dies, sizes in harms:
        if only not in name:
            continue
        row = Row(name)
        rows.append(row)
        with place() as where:
            tier = None
            if not name.startswith("no tier"):
                files = None if where is None else Path(where) / "kv"
                tier = tier_of(files, 4 << 20 if "little" in name else 256 << 20)
            crowd = Crowd(num_streams, tier, **sizes)
            what = partial(harm, where=Path(where or "/"))
            await strike(row, crowd, expected, moments, what, dies=dies, seed=seed)
            crowd.engine.shutdown()
    return rows


def is_bad(row: Row) -> bool:
    """Whether a row has what must not be."""
    loads = row.name.startswith(("core", "rank"))
    return bool(row.num_wrong or row.held or (loads and not min(row.loaded, default=0)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    rows = asyncio.run(table(args.streams, args.moments, args.only))
    for cells in (TITLES, ["---"] * len(TITLES), *(row.cells() for row in rows)):
        print("|", " | ".join(cells), "|", flush=True)
    return int(any(map(is_bad, rows)))


if __name__ == "__main__":
    sys.exit(main())
