"""A picture of a load: each request's latencies over the time at which it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.bench.serving.load import Outcome
from quire.errors import InvalidParameter


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    """Write a PNG. Raises InvalidParameter where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install 'quire[bench]'."
        raise InvalidParameter("--plot", str(file), "needs matplotlib", hint) from None
    done = sorted((o for o in outcomes if o.is_ok), key=lambda o: o.start)
    figure = Figure(figsize=(9, 6), layout="constrained")
    first, between = figure.subplots(2, 1, sharex=True)
    starts = [o.start for o in done]
    first.plot(starts, [1000 * o.ttft for o in done], ".", markersize=4)
    first.set_ylabel("time to first token, ms")
    moments, gaps = [], []
    for outcome in done:
        at = outcome.start + outcome.ttft
        for gap in outcome.gaps:
            at += gap
            moments.append(at)
            gaps.append(1000 * gap)
    between.plot(moments, gaps, ",")
    between.set_ylabel("time between tokens, ms")
    between.set_xlabel("seconds since the start")
    for axes in (first, between):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
