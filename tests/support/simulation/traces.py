"""The command line of a simulation: so many traces, from a seed on, with the rate on the way."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

_A_CALL = 1000


def run_as_command(run_traces: Callable[[int, int], object], description: str) -> None:
    """Parse `--traces` and `--first` and call run_traces(first seed, count) for them in turn."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first trace")
    args = parser.parse_args()
    start = time.perf_counter()
    for done in range(0, args.traces, _A_CALL):
        count = min(_A_CALL, args.traces - done)
        run_traces(args.first + done, count)
        rate = (done + count) / (time.perf_counter() - start)
        sys.stderr.write(f"\r{done + count} traces, {rate:.0f} a second")
    sys.stderr.write("\nall right\n")
