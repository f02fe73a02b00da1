"""Processor time of `quire serve` on the embedded model from its start until it serves.

    python -m benchmarks.server_start [--trees TREE ...] [--starts 5]

A tree is a checkout of Quire, with its native module built; several are started in turns. Counts
the front end, its core and what they have started by then, each with bytecode, which one start
more than is asked for writes beforehand. The server is watched by its log: questions would cost
it time of their own.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
_LOOK_S = 0.02
_READY = " Serving "


def processor_times(process: psutil.Process) -> tuple[float, float]:
    """Seconds of a server's own process, and of those that it has started."""
    own, *others = (sum(each.cpu_times()) for each in (process, *process.children(recursive=True)))
    return own, sum(others)


def start(tree: Path, scratch: Path) -> tuple[float, float]:
    """The processor times of one start."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONPYCACHEPREFIX": str(scratch / tree.resolve().name),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    model = tree / "src/quire/embedded/checkpoint"
    words = [sys.executable, "-m", "quire", "serve", str(model), "--port", "0"]
    log = scratch / "log"
    with log.open("w") as out:
        server = subprocess.Popen(words, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        while _READY not in log.read_text():
            if server.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(_LOOK_S)
        return processor_times(psutil.Process(server.pid))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def main() -> None:
    """Print the median and the range of each tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", nargs="+", type=Path, default=[ROOT])
    parser.add_argument("--starts", type=int, default=5)
    args = parser.parse_args()
    found: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in args.trees}
    with tempfile.TemporaryDirectory() as scratch:
        for tree in args.trees:
            start(tree, Path(scratch))
        for _ in range(args.starts):
            for tree in args.trees:
                found[tree].append(start(tree, Path(scratch)))
    print("| tree | all, s (range) | front end | core |\n| --- | --- | --- | --- |")
    for tree, times in found.items():
        front, core = (statistics.median(each) for each in zip(*times, strict=True))
        sums = sorted(map(sum, times))
        print(
            f"| {tree.resolve().name} | {statistics.median(sums):.2f} "
            f"({sums[0]:.2f} to {sums[-1]:.2f}) | {front:.2f} | {core:.2f} |"
        )


if __name__ == "__main__":
    main()
