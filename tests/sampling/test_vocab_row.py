"""Queries of a row against sorting it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.sampling.sample import greedy
from quire.ops.sampling.vocab_row import VocabRow

SIZES = [1, 2, 63, 64, 65, 128, 1000, 4096, 20_001]


@st.composite
def rows(draw):
    """Rows with many ties, -inf and awkward sizes."""
    size = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal(size).astype(np.float32) * 4
    if draw(st.booleans()):
        values = np.round(values)
    if draw(st.booleans()):
        values[rng.random(size) < draw(st.sampled_from([0.1, 0.9, 0.999]))] = -np.inf
    return values


def ranking(values):
    """Ids by value descending, then id ascending."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@settings(max_examples=80, deadline=None)
@given(rows(), st.data())
def test_queries(values, data):
    row = VocabRow(torch.from_numpy(values))
    order = ranking(values)
    k = data.draw(st.one_of(st.integers(1, len(values)), st.integers(1, min(30, len(values)))))
    assert row.peak == values[order[0]]
    assert row.first_max() == order[0]
    assert row.top(k).tolist() == order[:k]
    assert row.top(0).tolist() == []
    threshold = float(values[order[k - 1]])
    assert row.kth_largest(k) == threshold
    assert row.at_least(threshold).tolist() == np.flatnonzero(values >= threshold).tolist()
    assert row.count_at_least(threshold) == int((values >= threshold).sum())
    if math.isfinite(row.peak):
        exact = math.log(np.exp(values.astype(np.float64) - values.max()).sum())
        assert row.log_sum() == pytest.approx(exact, rel=1e-5, abs=1e-6)


def test_nan_reaches_the_peak():
    for size in SIZES:
        values = torch.zeros(size)
        values[size // 2] = math.nan
        assert math.isnan(VocabRow(values).peak)
        assert math.isnan(greedy(values[None])[1].item())


@settings(max_examples=40, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_greedy_is_the_first_largest(batch):
    size = min(map(len, batch))
    logits = np.stack([values[:size] for values in batch])
    token_ids, peaks = greedy(torch.from_numpy(logits))
    assert token_ids.tolist() == logits.argmax(axis=1).tolist()
    assert peaks.tolist() == logits.max(axis=1).tolist()
    assert token_ids.dtype == torch.int64
