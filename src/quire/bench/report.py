"""The end of every measurement: words for people, then one line of JSON, and a file if wanted."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of a flag whose value is an integer of at least `least`."""

    def count(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
        return found

    return count


def add_output_flag(parser: argparse.ArgumentParser) -> None:
    """`--output-json FILE`."""
    parser.add_argument("--output-json", type=Path, help="write the figures to a file")


def finish(figures: Mapping[str, Any], file: Path | None) -> None:
    """Print the figures as the last line and write them to `file`, if there is one."""
    print(json.dumps(figures))
    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def conclude(figures: Mapping[str, Any], failures: Sequence[str], file: Path | None) -> int:
    """Print each figure and each broken promise, finish; the exit code."""
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        print(f"{name:{width}} {f'{value:.4g}' if isinstance(value, float) else value}")
    for text in failures:
        print(f"FAILED: {text}")
    finish(figures, file)
    return 1 if failures else 0


def print_share(figures: Mapping[str, Any]) -> None:
    """The machine's limits and our share of them, in words."""
    machine = figures["machine"]
    print(
        f"Limits of {machine['num_threads']} threads: {machine['read_bytes_per_s'] / 1e9:.1f} GB/s "
        f"by {machine['read_by']}, {machine['flops_per_s'] / 1e9:.0f} GFLOP/s by "
        f"{machine['flops_by']}"
    )
    rates = machine["torch_flops_per_s"]
    for dtype, rate in rates.items():
        emulated = ", emulated" if rate < rates["float32"] / 2 else ""
        print(f"torch's {dtype} product reaches {rate / 1e9:.3g} GFLOP/s{emulated}")
    print(f"That is {figures['share_of_machine_limit']:.0%} of this machine's limit.")


def percentile(values: list[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
