"""SIGKILL at random moments in a real Ray cluster, under streams that must not notice.

    python -m tests.clusters.random_deaths [--rounds 10] [--seed 0] [--only cores|ranks]

An engine of two cores, and one whose two ranks are behind actors, each with 32 streams at a time.
In each round a process of a core or rank, its actor, or the raylet of its node is killed at some
moment, also while what died before is still coming back. Each stream must end with the ids of an
undisturbed run, or all of those that do not with one clear error. Exits with 1 otherwise. It needs
`pip install ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from quire import AsyncEngineArgs, AsyncLLM
from tests.clusters.run import (
    NUM_STREAMS,
    RAY,
    TWO,
    WORKERS,
    cluster,
    core_process,
    rank_process,
    raylet_of,
    stream,
)

LONGEST_S = 180.0
"""Seconds in which the streams of a round end, whatever died: a start, and their own time."""
LATEST_S = 3.0
"""The latest moment of a death after the streams have begun."""

Victim = Callable[[AsyncLLM, random.Random], psutil.Process]


def core(engine: AsyncLLM, chance: random.Random) -> psutil.Process:
    """The process of a core."""
    return core_process(engine, chance.randrange(2))


def rank(engine: AsyncLLM, chance: random.Random) -> psutil.Process:
    """The process of a rank."""
    return rank_process(chance.randrange(2))


def actor_of(victim: Victim) -> Victim:
    """The actor that hosts such a process."""

    def found(engine: AsyncLLM, chance: random.Random) -> psutil.Process:
        parent = victim(engine, chance).parent()
        assert parent is not None, "an actor lives as long as its process"
        return parent

    return found


def raylet_under(victim: Victim, head: int) -> Victim:
    """The raylet of such a process's node, unless that is the driver's, with which all would end:
    then the process itself.
    """

    def found(engine: AsyncLLM, chance: random.Random) -> psutil.Process:
        process = victim(engine, chance)
        raylet = raylet_of(process)
        return process if raylet.pid == head else raylet

    return found


def kill(victim: Victim, engine: AsyncLLM, chance: random.Random) -> str:
    """Kill a process; its name, or "" where there is none now, since it is coming back."""
    try:
        process = victim(engine, chance)
        name = process.name()
        process.send_signal(signal.SIGKILL)
    except (psutil.NoSuchProcess, StopIteration, AssertionError):
        return ""
    return name


async def rounds(
    nodes: Cluster, victim: Victim, wishes: dict[str, Any], num_rounds: int, chance: random.Random
) -> bool:
    """Run the rounds with one engine; whether all was right."""
    ours = psutil.Process().children(recursive=True)
    head = next(each.pid for each in ours if is_head(each, nodes))
    kinds = {
        "process": victim,
        "actor": actor_of(victim),
        "raylet": raylet_under(victim, head),
    }
    engine = await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**wishes))
    is_good = True
    try:
        right = await asyncio.gather(*(stream(engine, i, "a") for i in range(NUM_STREAMS)))
        for number in range(num_rounds):
            kind = chance.choice(list(kinds))
            began = time.monotonic()
            streams = [
                asyncio.ensure_future(stream(engine, i, f"r{number}-")) for i in range(NUM_STREAMS)
            ]
            num_before = engine.front_end.client.num_restarts
            dead = []
            for _ in range(chance.choice((1, 1, 2))):
                moment_s = chance.random() * LATEST_S
                await asyncio.sleep(moment_s)
                name = await asyncio.to_thread(kill, kinds[kind], engine, chance)
                if name:
                    dead.append(f"{name} after {time.monotonic() - began:.2f} s")
                if name == "raylet":
                    nodes.add_node(num_cpus=1)  # which Ray allows in the main thread alone
            gathered = asyncio.gather(*streams, return_exceptions=True)
            found = await asyncio.wait_for(gathered, LONGEST_S)
            errors = sorted({str(each) for each in found if isinstance(each, BaseException)})
            num_wrong = sum(
                isinstance(b, list) and a != b for a, b in zip(right, found, strict=True)
            )
            num_right = sum(a == b for a, b in zip(right, found, strict=True))
            is_good &= not num_wrong and len(errors) <= 1
            num_restarts = engine.front_end.client.num_restarts - num_before
            print(
                f"| {number} | {kind} | {', '.join(dead)} | {num_right} of {NUM_STREAMS} | "
                f"{num_wrong} | {'; '.join(errors)} | {num_restarts} | "
                f"{time.monotonic() - began:.1f} |",
                flush=True,
            )
            if engine.errored:
                break
    finally:
        await asyncio.to_thread(engine.shutdown)
    return is_good


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
    args = parser.parse_args()
    ranks = {**WORKERS, **TWO, "data_parallel_backend": "mp"}
    engines: dict[str, tuple[Victim, dict[str, Any]]] = {
        "cores": (core, RAY),
        "ranks": (rank, ranks),
    }
    is_good = True
    for name, (victim, wishes) in engines.items():
        if args.only not in ("", name):
            continue
        print(f"{name}, seed {args.seed}", flush=True)
        print("| round | kind | killed | right | wrong | errors | restarts | seconds |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        chance = random.Random(args.seed)
        with cluster(3) as nodes:
            is_good &= asyncio.run(rounds(nodes, victim, wishes, args.rounds, chance))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
