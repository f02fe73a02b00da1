"""Cases of the ops on logits: the largest, draws, filters, ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from quire.ops.catalog import Ops
from quire.ops.sampling.noise import noise_keys, token_hashes
from tests.support.op_cases.case import Case, Draw, Prepared, by_row

VOCAB = 151_936
"""Of a real model: what benchmarks take."""

SETTINGS: dict[str, tuple[float, float, float, float]] = {
    "largest": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "hot": (2.0, 0, 1.0, 0.0),
    "cold": (0.03125, 0, 1.0, 0.0),
    "top_k": (1.0, 5, 1.0, 0.0),
    "top_k_1": (0.5, 1, 1.0, 0.0),
    "top_k_all": (1.0, 10**6, 1.0, 0.0),
    "top_p": (1.0, 0, 0.83, 0.0),
    "top_p_tiny": (1.0, 0, 1e-6, 0.0),
    "top_p_most": (2.0, 0, 0.9999, 0.0),
    "min_p": (1.0, 0, 1.0, 0.037),
    "all": (0.5, 40, 0.91, 0.011),
}
"""Name -> temperature, top_k, top_p, min_p; the temperatures divide without rounding."""


def _logits(draw: Draw, rows: int, width: int, kind: str) -> np.ndarray:
    """Coarse steps, so that ties are common; or normal values."""
    values = draw.rng.standard_normal((rows, width)) * 3
    if kind == "normal":
        return values
    values = np.round(values * 8) / 8
    if kind == "masked":
        values[draw.rng.random((rows, width)) < 0.9] = -math.inf
        values[:, width // 2] = -1.0
    if kind == "equal":
        values[:] = -3.0
    return values * 64 - 1000 if kind == "far" else values


def _noise(draw: Draw, rows: int, width: int) -> dict[str, Any]:
    keys = noise_keys(np.arange(rows) * 77 + 5, np.arange(rows) + width)
    return {"keys": draw.exact(keys), "hashes": token_hashes(width, torch.device(draw.device))}


def _draw(rows: int, width: int, kind: str, *, op: str = "draw", only: str = "") -> Case:
    """Row i has the i-th of the settings, or all the one that a benchmark is about."""
    names = [only] if only else list(SETTINGS)

    def prepare(_: Ops, draw: Draw) -> Prepared:
        settings = [SETTINGS[names[row % len(names)]] for row in range(rows)]
        arguments: dict[str, Any] = {
            "logits": draw.wide(_logits(draw, rows, width, kind)),
            "settings": draw.exact(np.array(settings, dtype=np.float64).reshape(rows, 4)),
        }
        axes = {"logits": 0, "settings": 0}
        if op == "draw":
            arguments |= _noise(draw, rows, width)
            axes["keys"] = 0
        return Prepared(arguments) if only else by_row(op, arguments, axes)

    return Case(op, f"{rows}x{width}-{only or kind}", prepare, is_bench=bool(only))


def _greedy(rows: int, width: int, kind: str, *, is_bench: bool = False) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {"logits": draw.wide(_logits(draw, rows, width, kind))}
        return Prepared(arguments) if is_bench else by_row("greedy", arguments, {"logits": 0})

    return Case("greedy", f"{rows}x{width}-{kind}", prepare, is_bench=is_bench)


def _rank(rows: int, width: int, num_top: int, kind: str, *, is_bench: bool = False) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {
            "logits": draw.wide(_logits(draw, rows, width, kind)),
            "token_ids": draw.integers(draw.rng.integers(0, width, rows)),
            "num_top": num_top,
        }
        if is_bench:
            return Prepared(arguments)
        return by_row("rank", arguments, {"logits": 0, "token_ids": 0})

    return Case("rank", f"{rows}x{width}-top{num_top}-{kind}", prepare, is_bench=is_bench)


_SHAPES = ((0, 16), (1, 1), (1, 67), (3, 64), (12, 17), (24, 300))

CASES = (
    *(_greedy(*shape, "coarse") for shape in _SHAPES),
    *(_greedy(3, 130, kind) for kind in ("masked", "equal", "far")),
    *(_draw(*shape, "coarse") for shape in _SHAPES),
    *(_draw(12, 200, kind) for kind in ("masked", "equal", "far")),
    *(_draw(*shape, "coarse", op="truncate") for shape in _SHAPES),
    *(_draw(12, 200, kind, op="truncate") for kind in ("masked", "equal", "far")),
    *(_rank(*shape, min(5, shape[1]), "coarse") for shape in _SHAPES),
    *(_rank(3, 130, num_top, "coarse") for num_top in (0, 1, 2, 3, 129, 130)),
    *(_rank(3, 200, 60, kind) for kind in ("equal", "far")),
    *(_greedy(rows, VOCAB, "normal", is_bench=True) for rows in (8, 32)),
    *(_draw(rows, VOCAB, "normal", only="hot") for rows in (8, 32)),
    *(_draw(32, VOCAB, "normal", only=name) for name in ("top_k", "top_p", "min_p", "all")),
    *(_rank(32, VOCAB, 20, "normal", is_bench=True) for _ in range(1)),
)
