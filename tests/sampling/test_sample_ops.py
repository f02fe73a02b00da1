"""Filters and draws on rows large enough for the short cuts, against sorting in float64."""

import math

import numpy as np
import pytest
import torch

from quire.ops.sampling.filters import survivors
from quire.ops.sampling.noise import noise_keys, token_hashes
from quire.ops.sampling.sample import draw_row, draw_rows
from quire.ops.sampling.vocab_row import VocabRow
from tests.sampling import sampling_oracle as oracle

VOCAB = 20_011
SHAPES = {
    "peaked": lambda rng: np.append(rng.standard_normal(VOCAB - 3), [14.0, 15.0, 13.5]),
    "wide": lambda rng: rng.standard_normal(VOCAB) * 3,
    "flat": lambda rng: rng.standard_normal(VOCAB) * 0.01,
    "equal": lambda rng: np.zeros(VOCAB),
    "steps": lambda rng: np.round(rng.standard_normal(VOCAB) * 2),
    "masked": lambda rng: np.where(rng.random(VOCAB) < 0.99, -np.inf, rng.standard_normal(VOCAB)),
}


def row_of(shape):
    return SHAPES[shape](np.random.default_rng(0)).astype(np.float32)


@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("shape", SHAPES)
def test_top_p_of_the_whole_row(shape, top_p):
    values = row_of(shape)
    found = survivors(VocabRow(torch.from_numpy(values)), 0, top_p, 0.0).tolist()
    order = sorted(range(VOCAB), key=lambda i: (-values[i], i))
    mass = np.exp(values[order].astype(np.float64) - values.max())
    before = np.cumsum(mass) - mass
    wanted = top_p * mass.sum()
    slack = 2e-6 * mass.sum()
    surely = 1 + int((before[1:] < wanted - slack).sum())
    perhaps = 1 + int((before[1:] < wanted + slack).sum())
    assert surely <= len(found) <= perhaps
    assert found == sorted(order[: len(found)])


@pytest.mark.parametrize("top_k", [1, 2, 50, 79, 1000, 3000, VOCAB - 1, VOCAB, VOCAB + 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_top_k_keeps_ties(shape, top_k):
    values = row_of(shape)
    found = survivors(VocabRow(torch.from_numpy(values)), top_k, 1.0, 0.0)
    kth = np.sort(values)[::-1][min(top_k, VOCAB) - 1]
    if top_k >= VOCAB or kth == -np.inf:
        assert found is None
    else:
        assert found.tolist() == np.flatnonzero(values >= kth).tolist()


def test_leaving_out_losers_does_not_change_the_draw():
    """The same token wins among all and among any set that has it."""
    values = row_of("wide")
    hashes = token_hashes(VOCAB)
    row = VocabRow(torch.from_numpy(values))
    for position in range(40):
        key = torch.from_numpy(noise_keys(np.array([9]), np.array([position])))[0]
        winner = draw_row(row, None, hashes, key)
        kept = survivors(row, 0, 0.95, 0.0)
        if winner in kept.tolist():
            assert draw_row(row, kept, hashes, key) == winner
        assert draw_row(row, torch.tensor([winner]), hashes, key) == winner


@pytest.mark.parametrize("vocab_size", [3, 17, 64, 1001, 4099])
def test_rows_together_equal_rows_alone(vocab_size):
    """Bitwise, for sizes that leave every remainder of a vector behind."""
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.standard_normal((23, vocab_size)).astype(np.float32))
    keys = torch.from_numpy(noise_keys(np.arange(23), np.arange(23) * 7))
    hashes = token_hashes(vocab_size)
    token_ids, _ = draw_rows(logits, hashes, keys)
    for i in range(23):
        assert draw_row(VocabRow(logits[i]), None, hashes, keys[i]) == token_ids[i]
        alone, peak = draw_rows(logits[i : i + 1], hashes, keys[i : i + 1])
        assert alone[0] == token_ids[i] and peak[0] == logits[i].max()


@pytest.mark.parametrize(("function", "spread"), [(torch.exp, 5.0), (torch.log1p, 0.3)])
def test_an_entry_does_not_depend_on_its_place(function, spread):
    """What drawing rows together rests upon: an entry gets the same bits wherever it lies."""
    values = (torch.randn(5003, generator=torch.Generator().manual_seed(0)) * spread).clamp_min(
        -0.99
    )
    whole = function(values)
    for start in range(70):
        part = function(values[start : start + 67].clone())
        assert torch.equal(part, whole[start : start + 67])


def test_only_the_largest_can_win_against_infinities():
    """A row in which one token is left always gives it, whatever its noise."""
    values = torch.full((200,), -math.inf)
    values[63] = -3.0
    hashes = token_hashes(200)
    keys = torch.from_numpy(noise_keys(np.zeros(500), np.arange(500)))
    assert draw_rows(values.expand(500, 200), hashes, keys)[0].unique().tolist() == [63]


def test_scores_of_the_oracle_agree_on_a_large_row():
    values = row_of("wide")
    hashes = token_hashes(VOCAB)
    key = torch.from_numpy(noise_keys(np.array([77]), np.array([5])))[0]
    scores = oracle.scores(values, 77, 5)
    assert draw_row(VocabRow(torch.from_numpy(values)), None, hashes, key) == scores.argmax()
