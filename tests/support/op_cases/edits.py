"""Cases of the edits before temperature: histories with and without output, ids that are not
tokens, logits that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quire.ops.catalog import Ops
from quire.ops.sampling.edits import WILD
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared

VOCAB = 151_936
"""Of a real model: what benchmarks take."""

NO_TOKEN = 2**31 - 1

Lengths = Sequence[tuple[int, int]]
"""Tokens of the prompt, and of prompt and output, of each row."""

PENALTIES = ((1.5, 0.5, 0.25), (1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.9), (0.7, -1.1, 1.3))
MIXED: Lengths = ((3, 9), (5, 5), (0, 4), (0, 0), (1, 60), (40, 41))


def _logits(draw: Draw, rows: int, width: int, kind: str) -> np.ndarray:
    values = np.round(draw.rng.standard_normal((rows, width)) * 24) / 8
    if kind == "not_finite":
        for value in (math.inf, -math.inf, math.nan, 0.0, -0.0):
            values[draw.rng.random((rows, width)) < 0.15] = value
    return values


def _history(draw: Draw, lengths: Lengths, width: int, kind: str) -> np.ndarray:
    """[2R, L] int32: the rows are every other one, backwards; other tokens are behind them."""
    longest = max((length for _, length in lengths), default=0) + 3
    ids = draw.rng.integers(0, width, (2 * len(lengths), longest), dtype=np.int32)
    for row, (_, length) in enumerate(lengths):
        drawn = draw.rng.integers(0, min(width, 7) if kind == "repeats" else width, length)
        if kind == "every_token":
            drawn = np.resize(draw.rng.permutation(width), length)
        if kind == "no_tokens":
            drawn = draw.rng.choice([-1, -(2**31), width, NO_TOKEN, 0], length)
        ids[_row(row, len(lengths)), :length] = drawn
    return ids


def _row(index: int, rows: int) -> int:
    return 2 * (rows - 1 - index)


def _places(lengths: Lengths) -> np.ndarray:
    rows = len(lengths)
    found = [(i, _row(i, rows), border, end) for i, (border, end) in enumerate(lengths)]
    return np.array(found, dtype=np.int64).reshape(rows, 4)


def _penalize(
    name: str, lengths: Lengths, width: int, kind: str = "", *, is_bench: bool = False
) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        rows = len(lengths)
        penalties = [PENALTIES[row % len(PENALTIES)] for row in range(rows)]
        places = _places(lengths)
        arguments: Arguments = {
            "logits": draw.wide(_logits(draw, rows, width, kind)),
            "history": draw.exact(_history(draw, lengths, width, kind)),
            "places": draw.integers(places),
            "penalties": draw.wide(np.array(penalties).reshape(rows, 3)),
        }
        alone = draw.integers(places * [0, 1, 1, 1])
        singles = (
            arguments
            | {each: arguments[each][i : i + 1] for each in ("logits", "penalties")}
            | {"places": alone[i : i + 1]}
            for i in range(0 if is_bench or kind == "not_finite" else rows)
        )
        return Prepared(arguments, tuple(singles))

    return Case("penalize", name, prepare, is_bench=is_bench)


def _some_rows() -> Case:
    """Two of five rows, not in order; of the others nothing changes."""

    def prepare(_: Ops, draw: Draw) -> Prepared:
        lengths = ((2, 20), (1, 9))
        places = _places(lengths)
        places[:, 0] = (4, 1)
        return Prepared(
            {
                "logits": draw.wide(_logits(draw, 5, 33, "")),
                "history": draw.exact(_history(draw, lengths, 33, "repeats")),
                "places": draw.integers(places),
                "penalties": draw.wide(np.array(PENALTIES[:2])),
            }
        )

    return Case("penalize", "2of5x33-repeats", prepare)


def _bias(name: str, rows: int, width: int, count: int, kind: str) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        chosen = draw.rng.permutation(rows * width)[:count]
        entries = np.stack([chosen // width, chosen % width], 1).astype(np.int32)
        values = draw.rng.standard_normal(count) * 30
        values[draw.rng.random(count) < 0.3] = -math.inf
        if kind == "no_tokens":
            entries[::2, 1] = draw.rng.choice([-1, width, NO_TOKEN], len(entries[::2]))
        if "twice" in kind:
            values[:] = -math.inf
            entries = entries[: count // 2]
            is_far = kind == "far_twice"
            entries = np.tile(entries, (2, 1)) if is_far else np.repeat(entries, 2, 0)
            values = values[: len(entries)]
        # backwards: place p is row rows - 1 - p
        places = _places([(0, 0)] * rows)[::-1].copy()
        return Prepared(
            {
                "logits": draw.wide(_logits(draw, rows, width, kind)),
                "places": draw.integers(places),
                "entries": draw.exact(entries),
                "values": draw.wide(values),
            }
        )

    return Case("bias_logits", name, prepare)


def _words(name: str, lengths: Lengths, width: int, length: int) -> Case:
    """Words that the output ends with, that it nearly ends with, and that begin in the prompt."""

    def prepare(_: Ops, draw: Draw) -> Prepared:
        rows = len(lengths)
        history = _history(draw, lengths, width, "repeats")
        words = []
        for place in range(rows):
            end = lengths[place][1]
            ids = history[_row(place, rows), :end].tolist()
            for size in range(length + 1):
                last = int(draw.rng.integers(width))
                before = ids[end - size :] if size <= end else [1] * size
                other = [(before[0] + 1) % width, *before[1:]] if before else []
                for begin in (before, other):
                    words.append([place, *[WILD] * (length - len(begin)), *begin, last])
            words.append([place, *[WILD] * length, width])
        return Prepared(
            {
                "logits": draw.wide(_logits(draw, rows, width, "")),
                "history": draw.exact(history),
                "places": draw.integers(_places(lengths)),
                "words": draw.exact(np.array(words, dtype=np.int32).reshape(-1, length + 2)),
            }
        )

    return Case("forbid_words", name, prepare)


CASES = (
    _penalize("mixed", MIXED, 67),
    _penalize("repeats", MIXED, 67, "repeats"),
    _penalize("every_token", ((50, 150), (0, 67), (67, 67)), 67, "every_token"),
    _penalize("no_tokens", MIXED, 67, "no_tokens"),
    _penalize("not_finite", MIXED, 67, "not_finite"),
    _penalize("one_token", ((0, 3), (2, 2)), 1),
    _penalize("long", ((300, 700), (10, 257)), 1000),
    _penalize("no_history", ((0, 0), (0, 0)), 20),
    _penalize("no_rows", (), 20),
    _some_rows(),
    _bias("3x67", 3, 67, 40, ""),
    _bias("3x67-no_tokens", 3, 67, 40, "no_tokens"),
    _bias("3x67-not_finite", 3, 67, 60, "not_finite"),
    _bias("3x67-twice", 3, 67, 40, "twice"),
    _bias("2x400-many", 2, 400, 700, ""),
    _bias("2x400-far_twice", 2, 400, 700, "far_twice"),
    _bias("2x9-none", 2, 9, 0, ""),
    _words("one_token", MIXED, 67, 0),
    _words("short", MIXED, 67, 2),
    _words("long", MIXED, 67, 9),
    _words("none", (), 67, 2),
    _penalize("32x8000", ((2000, 8000),) * 32, VOCAB, is_bench=True),
)
