"""Numbers of logical CPUs in the notation of the kernel: `0-3,8`."""

from __future__ import annotations

from collections.abc import Collection


def parse_cpus(text: str) -> frozenset[int]:
    """The numbers that `text` lists; a part that is not a number or range is left out."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not dash):
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def format_cpus(cpus: Collection[int]) -> str:
    """List `cpus` in order, runs of them as ranges."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
