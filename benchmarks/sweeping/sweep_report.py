"""What came of a sweep: every run, their means by combination, as files, a table and a picture."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = (
    *("completed", "failed", "duration", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *(f"{way}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el")
      for way in ("mean", "median", "p99")),
)  # fmt: skip
"""What is taken from a run's file, where it has it."""

_COLUMNS = {
    "failed": "failed",
    "request_throughput": "req/s",
    "output_throughput": "out tok/s",
    "median_ttft_ms": "TTFT ms",
    "p99_ttft_ms": "p99",
    "median_tpot_ms": "TPOT ms",
    "p99_tpot_ms": "p99 ",
}


@dataclass(frozen=True)
class Run:
    """One run: which sets, which of its repetitions, and what `bench serve` wrote."""

    server: str
    load: str
    number: int
    figures: Mapping[str, Any]


def write_report(runs: Sequence[Run], folder: Path) -> list[dict[str, Any]]:
    """Write runs.csv, summary.csv and summary.json; the summary, in the order of the runs."""
    rows = [{"server": run.server, "load": run.load, "run": run.number, **_taken(run.figures)}
            for run in runs]  # fmt: skip
    summary = summarise(runs)
    _write_csv(folder / "runs.csv", rows)
    _write_csv(folder / "summary.csv", summary)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The mean of each figure over the runs of a combination, and `num_runs`. `failed` and
    `completed` are sums: a mean would hide a failure.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run.server, run.load), []).append(_taken(run.figures))
    summary = []
    for (server, load), taken in groups.items():
        row: dict[str, Any] = {"server": server, "load": load, "num_runs": len(taken)}
        for name in FIGURES:
            values = [figures[name] for figures in taken if name in figures]
            if values:
                is_count = name in ("completed", "failed")
                row[name] = sum(values) if is_count else statistics.fmean(values)
        summary.append(row)
    return summary


def table(summary: Sequence[Mapping[str, Any]]) -> str:
    """The summary for people."""
    lines = [["server", "load", *_COLUMNS.values()]]
    lines += [[row["server"], row["load"], *(_shown(row.get(name)) for name in _COLUMNS)]
              for row in summary]  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = []
    for line in lines:
        cells = [cell.ljust(width) if place < 2 else cell.rjust(width)
                 for place, (cell, width) in enumerate(zip(line, widths, strict=True))]  # fmt: skip
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def plot_summary(summary: Sequence[Mapping[str, Any]], file: Path) -> None:
    """A PNG: median latencies over throughput, one line for each set of the server.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for metric, one in zip(("ttft", "tpot"), axes, strict=True):
        name = f"median_{metric}_ms"
        for server in dict.fromkeys(row["server"] for row in summary):
            rows = [row for row in summary if row["server"] == server and name in row]
            places = [row["output_throughput"] for row in rows]
            one.plot(places, [row[name] for row in rows], "o-", label=server)
            for row in rows:
                one.annotate(row["load"], (row["output_throughput"], row[name]), fontsize=7)
        one.set_ylabel(f"median {metric.upper()}, ms")
        one.margins(x=0.15)  # room for what the points are called
        one.set_ylim(bottom=0)
        one.grid(alpha=0.3)
    axes[0].legend()
    axes[1].set_xlabel("output tokens per second")
    figure.savefig(file, dpi=120)


def _taken(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in FIGURES if figures.get(name) is not None}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(rows)
