"""SIGKILL at random moments in a real Ray cluster, under streams that must not notice.

    python -m tests.clusters.random_deaths [--rounds 10] [--seed 0] [--only cores|ranks]
        [--kind process|actor|raylet]

An engine of two cores, and one whose two ranks are behind actors, each with 32 streams at a time.
In each round a process of a core or rank, its actor, or the raylet of its node is killed at some
moment, also while what died before is still coming back. Each stream must end with the ids of an
undisturbed run, or all of those that do not with one clear error. Exits with 1 otherwise. It needs
`pip install ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
from ray.cluster_utils import Cluster

from quire import AsyncEngineArgs, AsyncLLM
from tests.clusters.run import (
    NUM_STREAMS,
    RAY,
    TWO,
    WORKERS,
    add_node,
    cluster,
    core_process,
    rank_process,
    raylet_of,
    stream,
)

LONGEST_S = 180.0
"""Seconds in which the streams of a round end, whatever died: a start, and their own time."""
LATEST_S = 5.0
"""The latest moment of a death after the streams have begun."""
NUM_TOKENS = 900
"""Of a stream, which is longer than the moment of a death and what Ray needs to notice it."""
LONG = {"max_model_len": 1024, "num_gpu_blocks_override": 3000}

Victim = Callable[[AsyncLLM, int], psutil.Process]


def core(engine: AsyncLLM, number: int) -> psutil.Process:
    return core_process(engine, number)


def rank(engine: AsyncLLM, number: int) -> psutil.Process:
    return rank_process(number)


def itself(process: psutil.Process) -> psutil.Process:
    return process


def actor_of(process: psutil.Process) -> psutil.Process:
    """The actor that hosts a process."""
    parent = process.parent()
    assert parent is not None, "an actor lives as long as its process"
    return parent


KINDS = {"process": itself, "actor": actor_of, "raylet": raylet_of}


class Death(NamedTuple):
    """A process that was killed, and the one of a core or rank that ends with it."""

    name: str
    ends: psutil.Process


def kill(
    victim: Victim, kind: str, engine: AsyncLLM, head: int, chance: random.Random
) -> Death | None:
    """Kill a process of the kind, unless it is `head`, the raylet of the driver's node, with which
    all would end: then the core or rank itself. None: there is none now, since it is coming back.
    """
    found = []
    for number in (0, 1):
        with suppress(psutil.Error, StopIteration, AssertionError):
            process = victim(engine, number)
            target = KINDS[kind](process)
            found.append((target.pid == head, chance.random(), target, process))
    if not found:
        return None
    is_spared, _, target, process = min(found, key=lambda each: each[:2])
    target = process if is_spared else target
    with suppress(psutil.NoSuchProcess):
        name = target.name()
        target.send_signal(signal.SIGKILL)
        return Death(name, process)
    return None


class Streams:
    """Streams of a round, each asked again until all deaths of the round have been felt.

    `longest_pause_s`: the longest time between two outputs of any.
    """

    def __init__(self, engine: AsyncLLM, name: str) -> None:
        self.deaths: list[Death] = []
        self.are_all_dead = False
        self.longest_pause_s = 0.0
        self._engine, self._name = engine, name

    async def run(self, number: int, right: list[int]) -> list[int]:
        """The ids of the last of a stream's runs, or of the first that was not right."""
        turn = 0
        while True:
            last = time.monotonic()

            def note() -> None:
                nonlocal last
                now = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now - last)
                last = now

            name = f"{self._name}-{turn}-"
            found = await stream(self._engine, number, name, NUM_TOKENS, note)
            if found != right or self._are_felt():
                return found
            turn += 1

    def _are_felt(self) -> bool:
        return self.are_all_dead and not any(death.ends.is_running() for death in self.deaths)


async def rounds(
    nodes: Cluster,
    lost: queue.Queue[None],
    victim: Victim,
    wishes: dict[str, Any],
    num_rounds: int,
    chance: random.Random,
    only: str,
) -> bool:
    """Run the rounds with one engine; whether all was right. `lost` gets an item for each node that
    has lost its raylet, to be replaced.
    """
    ours = psutil.Process().children(recursive=True)
    head = next(each.pid for each in ours if is_head(each, nodes))
    engine = await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**wishes))
    is_good = True
    try:
        first = [stream(engine, i, "a", NUM_TOKENS) for i in range(NUM_STREAMS)]
        right = await asyncio.gather(*first)
        for number in range(num_rounds):
            await are_back(engine)
            kind = only or chance.choice(list(KINDS))
            began = time.monotonic()
            streams = Streams(engine, f"r{number}")
            running = [asyncio.ensure_future(streams.run(i, ids)) for i, ids in enumerate(right)]
            num_before = engine.front_end.client.num_restarts
            words = []
            for _ in range(chance.choice((1, 1, 2))):
                await asyncio.sleep(chance.random() * LATEST_S)
                death = await asyncio.to_thread(kill, victim, kind, engine, head, chance)
                if death is None:
                    continue
                streams.deaths.append(death)
                words.append(f"{death.name} after {time.monotonic() - began:.2f} s")
                if death.name == "raylet":
                    lost.put(None)
            streams.are_all_dead = True
            gathered = asyncio.gather(*running, return_exceptions=True)
            found = await asyncio.wait_for(gathered, LONGEST_S)
            errors = sorted({str(each) for each in found if isinstance(each, BaseException)})
            num_wrong = sum(
                isinstance(b, list) and a != b for a, b in zip(right, found, strict=True)
            )
            num_right = sum(a == b for a, b in zip(right, found, strict=True))
            is_good &= not num_wrong and len(errors) <= 1
            num_restarts = engine.front_end.client.num_restarts - num_before
            print(
                f"| {number} | {kind} | {', '.join(words)} | {num_right} of {NUM_STREAMS} | "
                f"{num_wrong} | {'; '.join(errors)} | {num_restarts} | "
                f"{streams.longest_pause_s:.1f} | {time.monotonic() - began:.1f} |",
                flush=True,
            )
            if engine.errored:
                break
    finally:
        await asyncio.to_thread(engine.shutdown)
    return is_good


async def are_back(engine: AsyncLLM) -> None:
    """Wait until all cores are ready, so that there is something to kill."""
    client = engine.front_end.client
    deadline = time.monotonic() + LONGEST_S
    while not all(client.core_status(i).is_started for i in client.engine_indices):
        assert time.monotonic() < deadline, "a core did not come back"
        await asyncio.sleep(0.2)


def is_head(process: psutil.Process, nodes: Cluster) -> bool:
    """Whether this is the raylet of the cluster's first node."""
    try:
        name = nodes.head_node.plasma_store_socket_name
        return process.name() == "raylet" and any(name in word for word in process.cmdline())
    except psutil.Error:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", choices=("", "cores", "ranks"))
    parser.add_argument("--kind", default="", choices=("", *KINDS))
    args = parser.parse_args()
    ranks = {**WORKERS, **TWO, **LONG, "data_parallel_backend": "mp"}
    engines: dict[str, tuple[Victim, dict[str, Any]]] = {
        "cores": (core, {**RAY, **LONG}),
        "ranks": (rank, ranks),
    }
    is_good = True
    for name, (victim, wishes) in engines.items():
        if args.only not in ("", name):
            continue
        print(f"{name}, seed {args.seed}", flush=True)
        print("| round | kind | killed | right | wrong | errors | restarts | pause | seconds |")
        print("|" + " --- |" * 9, flush=True)
        chance = random.Random(args.seed)
        with cluster(3) as nodes:
            lost: queue.Queue[None] = queue.Queue()
            # the event loop must not stand still while a node starts, for which Ray needs the main
            # thread
            with ThreadPoolExecutor(1) as thread:
                task = rounds(nodes, lost, victim, wishes, args.rounds, chance, args.kind)
                done = thread.submit(asyncio.run, task)
                while not done.done():
                    with suppress(queue.Empty):
                        lost.get(timeout=0.2)
                        add_node(nodes)
            is_good &= done.result()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
