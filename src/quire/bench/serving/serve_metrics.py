"""Figures of a load: throughput, latencies, goodput; as JSON and as a table.

The names are those that load generators for OpenAI-compatible servers have in common, so that
dashboards and scripts that read one file read the other.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.report import percentile
from quire.bench.serving.load import Outcome
from quire.errors import InvalidParameter

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""Short name -> heading. Values are in seconds here and in milliseconds in the figures."""

_WIDTH = 50


def values_of(metric: str, outcomes: Sequence[Outcome]) -> list[float]:
    """The metric's values, in seconds, of requests that succeeded."""
    done = [outcome for outcome in outcomes if outcome.is_ok]
    if metric == "ttft":
        return [outcome.ttft for outcome in done]
    if metric == "tpot":
        return [outcome.tpot for outcome in done if outcome.output_len > 1]
    if metric == "itl":
        return [gap for outcome in done for gap in outcome.gaps]
    return [outcome.latency for outcome in done]


def figures_of(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Everything about a load that took `duration` seconds. goodput: metric -> limit in ms."""
    done = [outcome for outcome in outcomes if outcome.is_ok]
    inputs = sum(outcome.prompt_len for outcome in done)
    outputs = sum(outcome.output_len for outcome in done)
    good = [outcome for outcome in done if is_good(outcome, goodput)]
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": len(good) / duration if goodput else None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": peak_rate(done),
        "max_concurrent_requests": peak_concurrency(outcomes),
    }
    for metric in metrics:
        figures |= _distribution(metric, values_of(metric, outcomes), percentiles)
    return figures


def _distribution(
    metric: str, seconds: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    values = [1000 * value for value in seconds] or [0.0]
    figures = {
        f"mean_{metric}_ms": statistics.fmean(values),
        f"median_{metric}_ms": statistics.median(values),
        f"std_{metric}_ms": statistics.pstdev(values),
    }
    return figures | {f"p{p:g}_{metric}_ms": percentile(values, p) for p in percentiles}


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a request that succeeded kept all limits (metric -> ms)."""
    took = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(1000 * took[metric] <= limit for metric, limit in limits.items())


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """["ttft:200", ...] -> metric -> ms. Raises InvalidParameter for anything else."""
    limits = {}
    for word in words:
        metric, _, limit = word.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = -1.0
        if metric not in ("ttft", "tpot", "e2el") or value <= 0:
            raise InvalidParameter("--goodput", word, "write ttft:MS, tpot:MS or e2el:MS")
        limits[metric] = value
    return limits


def peak_rate(outcomes: Sequence[Outcome]) -> float:
    """Tokens of the fullest second. An event may have several; which of them is not told, so each
    counts as many as the events of its request have on average.
    """
    seconds: defaultdict[int, float] = defaultdict(float)
    for outcome in outcomes:
        tokens = outcome.output_len / (1 + len(outcome.gaps))
        at = outcome.start + outcome.ttft
        seconds[int(at)] += tokens
        for gap in outcome.gaps:
            at += gap
            seconds[int(at)] += tokens
    return max(seconds.values(), default=0.0)


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests under way at a time, of those that succeeded."""
    changes = [(outcome.start, 1) for outcome in outcomes if outcome.is_ok]
    changes += [(o.start + o.latency, -1) for o in outcomes if o.is_ok]
    now = most = 0
    # at equal times an end comes before a start
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def table(figures: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures for people."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests", figures["completed"]),
        ("Failed requests", figures["failed"]),
    ]
    if figures.get("max_concurrency"):
        rows.append(("Maximum request concurrency", figures["max_concurrency"]))
    if figures.get("request_rate", "inf") != "inf":
        rows.append(("Request rate configured (RPS)", figures["request_rate"]))
    rows += [
        ("Benchmark duration (s)", figures["duration"]),
        ("Total input tokens", figures["total_input_tokens"]),
        ("Total generated tokens", figures["total_output_tokens"]),
        ("Request throughput (req/s)", figures["request_throughput"]),
    ]
    if figures["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", figures["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s)", figures["output_throughput"]),
        ("Peak output token throughput (tok/s)", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests", figures["max_concurrent_requests"]),
        ("Total token throughput (tok/s)", figures["total_token_throughput"]),
    ]
    lines = [" Serving Benchmark Result ".center(_WIDTH, "="), *map(_line, rows)]
    for metric in metrics:
        lines.append(METRICS[metric].center(_WIDTH, "-"))
        short = metric.upper()
        ways = [("Mean", "mean"), ("Median", "median")]
        ways += [(f"P{p:g}", f"p{p:g}") for p in percentiles]
        lines += [_line((f"{way} {short} (ms)", figures[f"{k}_{metric}_ms"])) for way, k in ways]
    return "\n".join([*lines, "=" * _WIDTH])


def _line(row: tuple[str, Any]) -> str:
    label, value = row
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':40} {shown}"
