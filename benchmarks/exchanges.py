"""The exchanges of ranks on one host: shared memory next to gloo, in one run and as a share of
what a copy in memory reaches.

    python benchmarks/exchanges.py [--size 2] [--bytes 4096 65536 1048576 16777216]

Every rank is a process. An all-gather brings each rank the tensors of all; an all-reduce is the
same with the sum after it, in the order of the ranks, as products of several ranks have it. The
bandwidth of an all-gather counts the bytes that one rank gets.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.distributed.gloo_group import GlooGroup
from quire.distributed.network_workers import NetworkWorkers
from quire.distributed.shared_group import SharedExchange, SharedGroup
from quire.ops.segments import add_up

_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_SECONDS = 0.4
"""Of one measurement."""
_ROWS = 16


def copy_bandwidth(num_bytes: int = 64 << 20) -> float:
    """Bytes that one core copies in a second, from memory to memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def seconds_of(group: Any, call: Callable[[], Tensor]) -> float:
    """The median time of a collective, of which every rank makes as many."""
    call()
    start = time.perf_counter()
    for _ in range(3):
        call()
    each = torch.tensor([(time.perf_counter() - start) / 3])
    count = max(5, int(_SECONDS / float(group.largest(each))))
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[count // 2]


def measure(group: Any, num_bytes: int) -> dict[str, float]:
    """Seconds of each collective of tensors of so many bytes."""
    x = torch.ones(_ROWS, num_bytes // 4 // _ROWS)
    out = torch.empty(_ROWS, group.size, x.shape[1])
    return {
        "all-gather": seconds_of(group, lambda: group.gather(x, out)),
        "all-reduce": seconds_of(group, lambda: add_up(group.gather(x, out))),
    }


def rank_main(
    rank: int, size: int, memory: int, store: str, sizes: list[int], answers: Any
) -> None:
    """Measure as one rank; the first one reports."""
    torch.set_num_threads(1)
    shared = SharedGroup(memory, rank)
    gloo = NetworkWorkers(lambda _: GlooGroup.of_file(Path(store), rank, size, 60.0))
    for num_bytes in sizes:
        for name, group in (("shared", shared), ("gloo", gloo)):
            found = measure(group, num_bytes)
            if rank == 0:
                answers.put((name, num_bytes, found))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=list(_BYTES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    copied = copy_bandwidth()
    exchange = SharedExchange(args.size, max(args.bytes))
    context = mp.get_context("fork")  # the ranks inherit the memory
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=rank_main,
                args=(rank, args.size, exchange.fileno(), f"{folder}/store", args.bytes, answers),
            )
            for rank in range(args.size)
        ]
        for process in ranks:
            process.start()
        print(f"one core copies {copied / 1e9:.1f} GB/s; {args.size} ranks")
        print(f"{'bytes':>10} {'':>12} {'shared':>12} {'gloo':>12} {'times':>6}  share of a copy")
        for _ in args.bytes:
            (_, count, own), (_, _, other) = answers.get(timeout=120), answers.get(timeout=120)
            for name in own:
                rate = count * args.size / own[name]
                print(
                    f"{count:>10} {name:>12} {own[name] * 1e6:>9.1f} us "
                    f"{other[name] * 1e6:>9.1f} us {other[name] / own[name]:>6.1f}  "
                    f"{rate / copied:.2f}"
                )
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
