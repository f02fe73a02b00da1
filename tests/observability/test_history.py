"""The course of metrics: what changed in each period, for as long as is kept."""

import pytest

from quire.observability.history import MetricsHistory, quantile
from quire.observability.metrics import Counter, Gauge, Histogram


def metrics(running, tokens, queries=0, hits=0, first=(0, 0, 0), queued=(0, 0.0)):
    at_most = {"0.1": first[0], "1": first[1], "+Inf": first[2]}
    return [
        Gauge("vllm:num_requests_running", {"engine": "0"}, running),
        Gauge("vllm:num_requests_running", {"engine": "1"}, 1),
        Counter("vllm:generation_tokens", {}, tokens),
        Counter("vllm:prefix_cache_queries", {}, queries),
        Counter("vllm:prefix_cache_hits", {}, hits),
        Histogram("vllm:time_to_first_token_seconds", {}, first[2], 0.0, at_most),
        Histogram("vllm:request_queue_time_seconds", {}, queued[0], queued[1], {"+Inf": queued[0]}),
    ]


def test_a_sample_has_what_changed_since_the_one_before():
    history = MetricsHistory(period_s=5)
    history.add(100.0, metrics(2, 10), {"process_bytes": 7.0})
    history.add(105.0, metrics(3, 60, 8, 2, (2, 4, 4), (4, 6.0)), {"process_bytes": 8.0})
    history.add(110.0, metrics(0, 60, 8, 2, (2, 4, 4), (4, 6.0)), {})
    course = history.since(0)
    assert course.times == [100.0, 105.0, 110.0]
    assert course.series["running"] == [3, 4, 1]
    assert course.series["generated_rate"] == [None, 10, 0]
    assert course.series["prefix_hits"] == [None, 0.25, None]
    assert course.series["first_token_p50"] == [None, 0.1, None]
    assert course.series["first_token_p95"] == [None, 0.91, None]
    assert course.series["queue_mean"] == [None, 1.5, None]
    assert course.series["process_bytes"] == [7, 8, None]
    assert history.since(105.0).times == [110.0] and history.since(110.0).times == []


def test_totals_that_start_again_count_for_nothing():
    history = MetricsHistory()
    for at, tokens in ((0.0, 50), (5.0, 10), (10.0, 20)):
        history.add(at, metrics(0, tokens), {})
    assert history.since(-1).series["generated_rate"] == [None, 0, 2]


def test_an_hour_is_kept():
    history = MetricsHistory(period_s=5, kept_s=3600)
    for number in range(1000):
        history.add(5.0 * number, [], {})
    assert len(history.since(-1).times) == 720 and history.since(-1).times[-1] == 4995.0


@pytest.mark.parametrize(("share", "wanted"), [(1 / 3, 0.5), (0.5, 0.625), (1.0, 1.0)])
def test_quantiles_lie_between_bounds(share, wanted):
    counts = [(0.5, 2), (1.0, 6), (float("inf"), 6)]
    assert quantile(counts, share) == pytest.approx(wanted)


def test_a_quantile_above_all_bounds_is_the_last_of_them():
    assert quantile([(0.5, 0), (float("inf"), 4)], 0.5) == 0.5
