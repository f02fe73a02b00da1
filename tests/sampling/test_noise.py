"""Noise against plain Python integers, against frozen vectors, and as random numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.sampling.noise import negative_waiting_times, noise_bits, noise_keys, token_hashes
from tests.sampling.sampling_oracle import noise as oracle_bits


def word(value):
    return torch.tensor([value], dtype=torch.int32)


def bits(seed, position, tokens, vocab_size=200_000):
    [[a, b]] = noise_keys(np.array([seed], dtype=np.uint64), np.array([position])).tolist()
    return noise_bits(token_hashes(vocab_size)[tokens], word(a), word(b))


VECTORS = [
    (0, 0, 0, 359980586),
    (0, 0, 1, 1277278348),
    (1, 0, 0, 1342832883),
    (0, 1, 0, 527148696),
    (42, 17, 151935, 13376362),
    (2**32, 5, 7, 2048580449),
    (2**64 - 1, 2**31 - 1, 100000, 777516289),
    (0x0123456789ABCDEF, 1000, 31999, 746787876),
]


@pytest.mark.parametrize(("seed", "position", "token", "expected"), VECTORS)
def test_vectors(seed, position, token, expected):
    assert bits(seed, position, [token]).item() == expected
    assert oracle_bits(seed, position, token) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, 199_999), min_size=1, max_size=40),
)
def test_equals_plain_integers(seed, position, tokens):
    expected = [oracle_bits(seed, position, token) for token in tokens]
    assert bits(seed, position, tokens).tolist() == expected


def test_waiting_times_keep_the_precision_of_small_values():
    raw = torch.tensor([0, 1, 2, 1000, 2**30, 2**31 - 1], dtype=torch.int32)
    times = -negative_waiting_times(raw).double()
    exact = [-math.log1p(-(bit + 0.5) / 2**31) for bit in raw.tolist()]
    assert torch.allclose(
        times[:-1], torch.tensor(exact[:-1], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert times[-1].item() == pytest.approx(24 * math.log(2), rel=1e-6)  # capped, not infinite


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345])
def test_waiting_times_are_exponential(seed):
    times = -negative_waiting_times(bits(seed, 7, slice(None))).double()
    quantiles = torch.quantile(times[:150_000], torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    expected = [-math.log1p(-q) for q in (0.1, 0.5, 0.9)]
    assert torch.allclose(quantiles, torch.tensor(expected, dtype=torch.float64), rtol=0.02)
    assert times.mean().item() == pytest.approx(1.0, abs=0.01)


def test_neighbours_are_uncorrelated():
    """Rows of neighbouring positions and seeds, and neighbouring tokens, must look independent."""
    rows = [bits(seed, position, slice(0, 50_000)) for seed in range(8) for position in range(8)]
    uniform = torch.stack(rows).double() / 2**31
    correlation = torch.corrcoef(uniform).fill_diagonal_(0.0)
    assert correlation.abs().max().item() < 5.0 / math.sqrt(50_000)
    shifted = torch.corrcoef(torch.stack([uniform[:, :-1].flatten(), uniform[:, 1:].flatten()]))
    assert abs(shifted[0, 1].item()) < 5.0 / math.sqrt(uniform.numel())
    across = torch.corrcoef(uniform[:, :200].T).fill_diagonal_(0.0)
    assert across.abs().max().item() < 5.5 / math.sqrt(64)


def test_each_bit_is_fair_over_positions():
    """One token's noise along a request: every high bit is set in half of the positions."""
    keys = noise_keys(np.zeros(4000, dtype=np.uint64), np.arange(4000)).tolist()
    one = token_hashes(5)[4:5]
    drawn = torch.cat([noise_bits(one, word(a), word(b)) for a, b in keys])
    for bit in range(31):
        assert abs((drawn >> bit & 1).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(4000)
