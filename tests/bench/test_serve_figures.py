"""Figures of a load, against values worked out by hand."""

import math

import pytest

from quire.bench.serving.load import Outcome, RequestShape
from quire.bench.serving.serve_metrics import (
    figures_of,
    parse_goodput,
    peak_concurrency,
    peak_rate,
    table,
)
from quire.errors import InvalidParameter

METRICS = ("ttft", "tpot", "itl", "e2el")
OUTCOMES = [
    Outcome(0.0, 10, 3, ttft=0.1, latency=0.5, gaps=[0.1, 0.3]),
    Outcome(0.2, 20, 1, ttft=0.3, latency=0.3),
    Outcome(0.6, 5, error="500: broken"),
]


def test_figures():
    figures = figures_of(
        OUTCOMES, 2.0, metrics=METRICS, percentiles=[50, 99], goodput={"ttft": 200.0}
    )
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 4)
    assert figures["request_throughput"] == 1.0 and figures["output_throughput"] == 2.0
    assert figures["total_token_throughput"] == 17.0 and figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx(200)  # of the one with more than one token
    assert figures["median_itl_ms"] == pytest.approx(200)
    assert figures["p99_e2el_ms"] == pytest.approx(498)
    assert figures["max_concurrent_requests"] == 2 and figures["max_output_tokens_per_s"] == 4
    assert "Failed requests:                         1" in table(figures, METRICS, [50, 99])


def test_nothing_succeeded():
    figures = figures_of(OUTCOMES[2:], 1.0, metrics=METRICS, percentiles=[99], goodput={})
    assert figures["completed"] == 0 and figures["mean_ttft_ms"] == 0.0
    assert figures["request_goodput"] is None
    assert "Successful requests" in table(figures, METRICS, [99])


def test_one_after_the_other_is_not_a_crowd():
    assert peak_concurrency([Outcome(i, 1, 1, 0.1, 1.0) for i in range(5)]) == 1


def test_the_peak_counts_tokens_and_not_events():
    """As with speculation, where an event has the tokens of several drafts."""
    assert peak_rate([Outcome(0.0, 1, 12, ttft=0.1, latency=0.5, gaps=[0.1, 0.1])]) == 12


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:fast", "itl:5", "e2el:-1"])
def test_goodput_is_checked(word):
    with pytest.raises(InvalidParameter, match="goodput"):
        parse_goodput([word])


def test_arrivals():
    assert RequestShape().arrivals(3) == [0.0, 0.0, 0.0]
    poisson = RequestShape(rate=50.0, seed=3).arrivals(4000)
    assert poisson[0] == 0.0 and poisson == sorted(poisson)
    assert poisson[-1] / 4000 == pytest.approx(1 / 50, rel=0.05)
    gaps = [b - a for a, b in zip(poisson, poisson[1:], strict=False)]
    even = RequestShape(rate=50.0, burstiness=1e6, seed=3).arrivals(100)
    assert max(abs(b - a - 0.02) for a, b in zip(even, even[1:], strict=False)) < 1e-3
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread / mean == pytest.approx(1.0, rel=0.1)  # of an exponential distribution
