"""Cases of the ops that treat each token by itself: embedding, norms, sums, gates; and of sums of
tokens.
"""

from __future__ import annotations

import numpy as np

from quire.ops.catalog import Ops
from quire.ops.mixers.pooling import SPAN
from quire.ops.norm import NormWeight
from tests.support.op_cases.case import Case, Draw, Prepared, by_row

EPS = 0.05
"""Large, so that an epsilon in the wrong place shows."""


def norm_weight(draw: Draw, kind: str, *shape: int, bias: bool = False) -> NormWeight:
    """A norm with random parameters."""
    weight = None if kind == "none" else draw.normal(*shape, mean=0.5)
    return NormWeight(kind, EPS, weight, draw.normal(*shape) if bias else None)


def _norm(
    kind: str,
    shape: tuple[int, ...],
    *,
    bias: bool = False,
    scale: float = 1.0,
    is_strided: bool = False,
    per_head: bool = False,
) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        x = (draw.strided if is_strided else draw.normal)(*shape, scale=scale)
        n = norm_weight(draw, kind, *(shape[-2:] if per_head else shape[-1:]), bias=bias)
        return by_row("norm", {"x": x, "n": n})

    traits = ["x".join(map(str, shape))]
    traits += [f"scale{scale:g}"] if scale != 1.0 else []
    traits += [
        name for name, on in (("bias", bias), ("strided", is_strided), ("per_head", per_head)) if on
    ]
    return Case("norm", "-".join([kind, *traits]), prepare)


def _norms() -> list[Case]:
    cases = []
    for kind in ("rms", "rms_late_cast", "rms1p", "layer", "layer1p", "none"):
        cases += [
            _norm(kind, (0, 16)),
            _norm(kind, (1, 16)),
            _norm(kind, (5, 17), is_strided=True),
            _norm(kind, (4, 33), scale=200.0),
            _norm(kind, (4, 33), scale=1e-3),
        ]
    cases += [_norm(kind, (3, 4, 8), per_head=True) for kind in ("rms", "rms1p", "layer")]
    cases += [_norm(kind, (6, 19), bias=True) for kind in ("layer", "layer1p")]
    cases.append(_norm("layer", (3, 4, 8), bias=True, per_head=True))
    return cases


def _sum(op: str, shape: tuple[int, int], scale: float, *, is_strided: bool = False) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        make = draw.strided if is_strided else draw.normal
        arguments = {"x": make(*shape), "delta": make(*shape), "scale": scale}
        if op == "add_norm":
            arguments["n"] = norm_weight(draw, "rms", shape[1])
        return by_row(op, arguments)

    layout = "-strided" if is_strided else ""
    return Case(op, f"{shape[0]}x{shape[1]}-scale{scale:g}{layout}", prepare)


def _gate(rows: int, width: int, gate_width: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {"y": draw.strided(rows, width), "gate": draw.strided(rows, gate_width)}
        return by_row("scale_gate", arguments)

    return Case("scale_gate", f"{rows}x{width}-gate{gate_width}", prepare)


def _scale_queries(rows: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {
            "q": draw.normal(rows, 3, 4),
            "positions": draw.integers(draw.rng.integers(0, 9, (1, rows))),
            "factors": draw.wide(draw.rng.random(9) + 1),
        }
        return by_row("scale_queries", arguments)

    return Case("scale_queries", str(rows), prepare)


def _mix_axes(rows: int, *axes: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {
            "positions": draw.integers(draw.rng.integers(0, 9, (max(axes) + 1, rows))),
            "table": draw.wide(draw.rng.random((9, 2 * len(axes)))),
            "axes": draw.integers(np.array(axes)),
        }
        return by_row("mix_axes", arguments)

    return Case("mix_axes", f"{rows}-{''.join(map(str, axes))}", prepare)


def _xielu(rows: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        return by_row("xielu", {"x": draw.strided(rows, 9), "numbers": draw.normal(4)})

    return Case("xielu", f"{rows}x9", prepare)


def _multiply(rows: int, width: int) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        return by_row("multiply", {"x": draw.strided(rows, 9), "factors": draw.normal(width)})

    return Case("multiply", f"{rows}x9-{width}", prepare)


def _modulate(rows: int, act: str) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {"x": draw.strided(rows, 9), "by": draw.strided(rows, 9), "act": act}
        return by_row("modulate", arguments)

    return Case("modulate", f"{rows}x9-{act}", prepare)


def _embed(rows: int, *, scale: float = 1.0, has_positions: bool = False) -> Case:
    def prepare(_: Ops, draw: Draw) -> Prepared:
        arguments = {
            "ids": draw.integers(draw.rng.integers(0, 11, rows)),
            "table": draw.normal(11, 9),
            "scale": scale,
        }
        if has_positions:
            arguments["positions"] = draw.integers(draw.rng.integers(0, 7, rows))
            arguments["position_table"] = draw.normal(7, 9)
        return by_row("embed", arguments)

    return Case("embed", f"{rows}-scale{scale:g}{'-positions' * has_positions}", prepare)


def _sum_chunks(*chunks: tuple[int, int], width: int = 17) -> Case:
    """Of some prompts: the position of a chunk's first token, and how many tokens it has."""
    firsts, counts = zip(*chunks, strict=True) if chunks else ((), ())

    def prepare(_: Ops, draw: Draw) -> Prepared:
        starts = [2 + sum(counts[:i]) for i in range(len(counts))]
        places = np.array([starts, firsts, counts], dtype=np.int64).T
        before = np.array(firsts).reshape(-1, 1)  # a sum of nothing is 0
        arguments = {
            "x": draw.strided(3 + sum(counts), width),
            "chunks": draw.integers(places.copy()),
            "spans": draw.wide(draw.rng.standard_normal((len(chunks), width)) * (before >= SPAN)),
            "rest": draw.wide(draw.rng.standard_normal((len(chunks), width)) * (before % SPAN > 0)),
        }
        return by_row("sum_chunks", arguments, {"chunks": 0, "spans": 0, "rest": 0})

    name = "+".join(f"{first}:{count}" for first, count in chunks)
    return Case("sum_chunks", f"{name or 'nothing'}-{width}", prepare)


CASES = (
    _sum_chunks(),
    _sum_chunks((0, 1)),
    _sum_chunks((0, SPAN), (0, SPAN - 1), (0, SPAN + 1), width=33),
    _sum_chunks((SPAN - 1, 1), (5, 70), (SPAN, 1), (40, 24), (0, 3)),
    *(_embed(rows) for rows in (0, 1, 6)),
    _embed(5, scale=3.3),
    _embed(5, scale=0.7, has_positions=True),
    *_norms(),
    *(_sum(op, (rows, 16), 1.0) for op in ("add", "add_norm") for rows in (0, 1, 5)),
    *(_sum(op, (5, 17), 0.37, is_strided=True) for op in ("add", "add_norm")),
    *map(_scale_queries, (0, 1, 6)),
    *(_mix_axes(rows, 0, 1, 1, 2, 0) for rows in (0, 1, 6)),
    *(_xielu(rows) for rows in (0, 1, 5)),
    *(_multiply(rows, width) for rows, width in ((0, 9), (1, 1), (5, 1), (5, 9))),
    *(_modulate(rows, act) for rows, act in ((0, "silu"), (5, "gelu"), (5, "gelu_tanh"))),
    *(_gate(rows, 8, width) for rows, width in ((0, 8), (1, 8), (5, 8), (5, 1))),
)
