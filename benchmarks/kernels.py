"""Every operation by itself, on the cases that have real shapes: time, traffic, arithmetic, share
of the machine's limits.

The caches are emptied before each call, because a model's weights do not stay in them; what is
printed is the median. Plain torch computes on as many threads.

    python -m benchmarks.kernels --op linear mlp --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import torch

from quire.bench.machine_limits import LimitProbe, MachineLimits
from quire.bench.report import add_output_flag, finish
from quire.config.args.command_line import QuireParser
from quire.errors import InvalidParameter
from quire.hardware.host import gather_machine_facts
from quire.hardware.placement import place
from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.ops import Ops, select
from tests.support.op_cases import CASES, CODED_CASES, Case

DTYPES = ("bfloat16", "float16", "float32")
_MIN_CALLS = 3


class Timed(msgspec.Struct, frozen=True):
    """One case with one provider: median seconds of a call, its formulas, its share of the larger
    limit.
    """

    op: str
    case: str
    provider: str
    isa: str
    dtype: str
    seconds: float
    num_bytes: int
    flops: int
    share_of_machine_limit: float


def main(words: Sequence[str] | None = None) -> int:
    """Measure as the command line says (default: the process's); the exit code."""
    parser = QuireParser(prog="python -m benchmarks.kernels", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(words)
    try:
        return run(args)
    except InvalidParameter as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    native, _ = find_native()
    levels = [name for name, why in native.levels() if not why] if native else []
    parser.add_argument("--op", nargs="+", help="names of ops; default all that have such cases")
    parser.add_argument("--case", nargs="+", help="parts of names of cases; default all")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--provider", nargs="+", default=["cpu", "torch"], help="default both")
    parser.add_argument(
        "--isa", nargs="+", choices=levels, default=levels[-1:], help="default the best"
    )
    parser.add_argument("--cpu-threads", type=int, help="default as many as an engine takes")
    parser.add_argument("--seconds", type=float, default=0.5, help="calls of one case take so long")
    add_output_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Time the cases and print a table."""
    num_threads = args.cpu_threads or place(gather_machine_facts()).num_threads
    probe = LimitProbe(args.dtype, num_threads)
    limits = probe.measure()
    print(f"{'op/case':32} {'provider':18} {'us':>10} {'GB/s':>7} {'GFLOP/s':>8} {'of limit':>8}")
    rows = []
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for case in chosen_cases(args.op, args.case):
            for provider, runtime, ops in providers(args, num_threads):
                rows.append(timed(case, provider, runtime, ops, args, probe, limits))
                print(line(rows[-1]), flush=True)
    finally:
        torch.set_num_threads(before)
    figures = {"machine": msgspec.to_builtins(limits), "kernels": msgspec.to_builtins(rows)}
    finish(figures, args.output_json)
    return 0


def chosen_cases(ops: list[str] | None, parts: list[str] | None) -> list[Case]:
    """The benchmark's cases. Raises InvalidParameter if nothing is left."""
    bench = [case for case in (*CASES, *CODED_CASES) if case.is_bench]
    found = [
        case
        for case in bench
        if (ops is None or case.op in ops)
        and (parts is None or any(part in case.name for part in parts))
    ]
    if not found:
        known = ", ".join(f"{case.op}/{case.name}" for case in bench)
        raise InvalidParameter("--op/--case", ops or parts, f"the cases are {known}")
    return found


def providers(
    args: argparse.Namespace, num_threads: int
) -> Iterator[tuple[str, CpuRuntime | None, Ops]]:
    """(provider, its threads and instruction set, its ops) for each that was asked for."""
    dtype = getattr(torch, args.dtype)
    for provider in args.provider:
        if provider != "cpu":
            yield provider, None, select(device="cpu", dtype=dtype, providers=[provider])
            continue
        for isa in args.isa:
            runtime = CpuRuntime(num_threads=num_threads, isa=isa)
            ops = select(device="cpu", dtype=dtype, providers=[provider], runtime=runtime)
            yield provider, runtime, ops


def timed(
    case: Case,
    provider: str,
    runtime: CpuRuntime | None,
    ops: Ops,
    args: argparse.Namespace,
    probe: LimitProbe,
    limits: MachineLimits,
) -> Timed:
    """Call the op with cold caches for about `args.seconds`."""
    arguments = case.prepare(ops, case.draw(getattr(torch, args.dtype))).arguments
    case.run(ops, arguments)
    seconds: list[float] = []
    while sum(seconds) < args.seconds or len(seconds) < _MIN_CALLS:
        probe.evict(runtime)
        start = time.perf_counter()
        case.run(ops, arguments)
        seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds)
    num_bytes, flops = case.num_bytes(arguments), case.flops(arguments)
    least = max(num_bytes / limits.read_bytes_per_s, flops / limits.flops_per_s)
    return Timed(
        case.op,
        case.name,
        provider,
        runtime.isa if runtime else "",
        args.dtype,
        took,
        num_bytes,
        flops,
        least / took,
    )


def line(row: Timed) -> str:
    """A row of the table."""
    name = f"{row.provider} {row.isa}".strip()
    rates = (row.num_bytes / row.seconds / 1e9, row.flops / row.seconds / 1e9)
    return (
        f"{row.op + '/' + row.case:32} {name:18} {row.seconds * 1e6:10.1f} "
        f"{rates[0]:7.2f} {rates[1]:8.1f} {row.share_of_machine_limit:8.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
