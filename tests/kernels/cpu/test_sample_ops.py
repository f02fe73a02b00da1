"""The native sampling ops: conformance at every level, tokens equal to plain torch's, hostile rows,
and the same answer for few rows, many rows and any number of threads.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops import select
from quire.ops.sampling.noise import noise_keys, token_hashes
from tests.support.needs import needs_native
from tests.support.op_cases import CASES
from tests.support.op_conformance import check

KERNELS = ("sample",)
pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
OPS = ("greedy", "draw", "truncate", "rank")
SAMPLE_CASES = [case for case in CASES if case.op in OPS and not case.is_bench]
PLAIN = select(device="cpu", dtype=torch.float32, providers=["torch"])
VOCAB = 20_011
SHAPES = {
    "peaked": lambda rng: np.append(rng.standard_normal(VOCAB - 3), [14.0, 15.0, 13.5]),
    "wide": lambda rng: rng.standard_normal(VOCAB) * 3,
    "flat": lambda rng: rng.standard_normal(VOCAB) * 0.01,
    "equal": lambda rng: np.zeros(VOCAB),
    "steps": lambda rng: np.round(rng.standard_normal(VOCAB) * 2),
    "masked": lambda rng: np.where(rng.random(VOCAB) < 0.99, -np.inf, rng.standard_normal(VOCAB)),
    "huge": lambda rng: rng.standard_normal(VOCAB) * 1e4 + 3e7,
    "low": lambda rng: rng.standard_normal(VOCAB) * 2 - 5e4,
}
FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.7, 50, 1.0, 0.0),
    (0.9, 3000, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 0, 0.999999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (0.8, 0, 1.0, 0.02),
    (1.0, 400, 0.7, 0.001),
    (0.01, 0, 0.95, 0.0),
]


@cache
def native(isa=None, num_threads=1):
    runtime = CpuRuntime(num_threads=num_threads, isa=isa)
    return select(device="cpu", dtype=torch.float32, providers=["cpu"], runtime=runtime)


def rows_of(shape, count=1, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([SHAPES[shape](rng) for _ in range(count)])).float()


def draw_arguments(settings, width, first_seed=0):
    count = len(settings)
    keys = noise_keys(np.arange(count) + first_seed, np.arange(count) * 3)
    return torch.tensor(settings, dtype=torch.float64), torch.from_numpy(keys), token_hashes(width)


@pytest.mark.parametrize("case", SAMPLE_CASES, ids=lambda case: f"{case.op}/{case.name}")
def test_conforms(case, isa):
    check(case, torch.float32, native(isa))


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_definition(shape, isa):
    """Every filter and many seeds on rows large enough for the short cuts."""
    ops = native(isa)
    settings = FILTERS * 6
    logits = rows_of(shape, 3).repeat(len(settings) // 3, 1)
    arguments = draw_arguments(settings, VOCAB)
    ids, peaks = ops.draw(logits, *arguments)
    expected, expected_peaks = PLAIN.draw(logits, *arguments)
    assert ids.tolist() == expected.tolist() and torch.equal(peaks, expected_peaks)


@pytest.mark.parametrize("shape", SHAPES)
def test_survivors_are_those_of_the_definition(shape):
    """Exactly, but for a top-p whose border falls into the rounding of a sum."""
    logits = rows_of(shape).repeat(len(FILTERS), 1)
    settings = torch.tensor(FILTERS, dtype=torch.float64)
    found, expected = native().truncate(logits, settings), PLAIN.truncate(logits, settings)
    for i in range(len(FILTERS)):
        differing = (found[i] != expected[i]).nonzero().flatten()
        assert len(differing) <= (2 if FILTERS[i][2] < 1 else 0), FILTERS[i]


@pytest.mark.parametrize("num_top", [0, 1, 20, 79, 1000, VOCAB])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_are_those_of_the_definition(shape, num_top):
    logits = rows_of(shape, 2)
    token_ids = torch.tensor([VOCAB - 1, 17])
    found, expected = (o.rank(logits, token_ids, num_top) for o in (native(), PLAIN))
    for name in ("top_ids", "top_values", "ranks", "peaks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.allclose(found.log_sums, expected.log_sums, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_few_rows_many_rows_and_threads_agree(num_threads):
    """Few rows are cut into segments, many are not."""
    alone, ops = native(), native(num_threads=num_threads)
    logits = torch.randn(20, 40_000, generator=torch.Generator().manual_seed(1)) * 3
    arguments = draw_arguments(FILTERS * 2, 40_000)
    together = alone.draw(logits, *arguments)
    largest = alone.greedy(logits)
    settings, keys, hashes = arguments
    for size in (1, 3, 7, 8, 20):
        for i in range(0, 20 - size + 1, size):
            some = slice(i, i + size)
            found = ops.draw(logits[some], settings[some], keys[some], hashes)
            assert all(torch.equal(a, b[some]) for a, b in zip(found, together, strict=True))
            found = ops.greedy(logits[some])
            assert all(torch.equal(a, b[some]) for a, b in zip(found, largest, strict=True))


@pytest.mark.parametrize("where", [0, 63, 64, 16_384, VOCAB - 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("count", [1, 9])
def test_broken_rows_are_told_apart(bad, where, count):
    logits = rows_of("wide", count)
    logits[count // 2, where] = bad
    settings = [FILTERS[i % len(FILTERS)] for i in range(count)]
    for ids, peaks in (
        native().greedy(logits),
        native().draw(logits, *draw_arguments(settings, VOCAB)),
    ):
        assert peaks.isfinite().logical_not().nonzero().flatten().tolist() == [count // 2]
        assert math.isnan(peaks[count // 2]) == math.isnan(bad) and ids[count // 2] == 0


def test_rows_far_apart_and_ids_beyond_the_vocabulary():
    wide = torch.randn(9, 2 * 300)
    logits = wide[:, 100:397]
    assert native().greedy(logits)[0].tolist() == logits.argmax(1).tolist()
    with pytest.raises(IndexError):
        native().rank(logits, torch.full((9,), 297), 3)
