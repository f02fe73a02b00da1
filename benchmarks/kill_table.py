"""The kill table: signals at random moments under 64 concurrent streams of the embedded model.

    python -m benchmarks.kill_table [--moments 100] [--only WORD]

Every stream must end with the very ids of an undisturbed run. Exits with 1 if one does not, if a
stream waits longer than five seconds (eight where a core has ranks), or if anything is left behind.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable

from tests.support import kill_table as table

WORST_S, WORST_OF_RANKS_S = 5.0, 8.0


def runs(moments: int) -> dict[str, Callable[[], table.Row]]:
    """The rows' makers by name."""
    few = max(1, moments // 10)
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    four = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    ahead = {"tensor_parallel_size": 2, "async_scheduling": True}
    return {
        "core-kill": lambda: asyncio.run(table.signal_cores(kill, moments)),
        "core-stop": lambda: asyncio.run(table.signal_cores(stop, moments // 2)),
        "two-kill": lambda: asyncio.run(table.signal_cores(kill, moments // 2, num_cores=2)),
        "two-stop": lambda: asyncio.run(table.signal_cores(stop, few, num_cores=2)),
        "rank-kill-tp": lambda: asyncio.run(
            table.signal_ranks(kill, moments, tensor_parallel_size=2)
        ),
        "rank-stop-tp": lambda: asyncio.run(table.signal_ranks(stop, few, tensor_parallel_size=2)),
        "rank-kill-pp": lambda: asyncio.run(
            table.signal_ranks(kill, moments // 2, pipeline_parallel_size=2)
        ),
        "rank-stop-pp": lambda: asyncio.run(
            table.signal_ranks(stop, few, pipeline_parallel_size=2)
        ),
        "rank-kill-of-four": lambda: asyncio.run(table.signal_ranks(kill, moments // 2, **four)),
        "rank-stop-of-four": lambda: asyncio.run(table.signal_ranks(stop, few, **four)),
        "rank-kill-ahead": lambda: asyncio.run(table.signal_ranks(kill, few, **ahead)),
        "rank-stop-ahead": lambda: asyncio.run(table.signal_ranks(stop, few, **ahead)),
        "rank-kill-experts": lambda: asyncio.run(
            table.signal_ranks(kill, moments // 2, tensor_parallel_size=2, shares_experts=True)
        ),
        "rank-stop-experts": lambda: asyncio.run(
            table.signal_ranks(stop, few, tensor_parallel_size=2, shares_experts=True)
        ),
        "experts-kill": lambda: asyncio.run(table.kill_one_that_shares_experts(few)),
        "coordinator-kill": lambda: asyncio.run(
            table.kill_one_that_shares_experts(few, coordinator=True)
        ),
        "front-stop": lambda: asyncio.run(table.stop_front_end(few)),
        "front-kill": lambda: table.kill_front_end(few),
        "poison": lambda: asyncio.run(table.poison(few)),
    }


def is_bad(name: str, row: table.Row) -> bool:
    worst_s = WORST_OF_RANKS_S if name.startswith("rank-") else WORST_S
    late = [s for s in row.resumed_s if s > worst_s] if name != "poison" else []
    failed = row.num_failed and name != "poison"
    return bool(row.num_wrong or failed or row.leaks or late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=100, help="moments of the first row")
    parser.add_argument("--only", default="", help="rows whose name has this word")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    print("|", " | ".join(table.TITLES), "|")
    print("|", " | ".join("---" for _ in table.TITLES), "|")
    bad = []
    for name, run in runs(args.moments).items():
        if args.only in name:
            row = run()
            print("|", " | ".join(row.cells()), "|", flush=True)
            bad += [name] if is_bad(name, row) else []
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
