"""Cases beside those of the ops: rounded weights, and attention cut in other ways.

What rounded weights mean is plain torch's definition.
"""

from __future__ import annotations

from dataclasses import replace

from quire.ops import WeightFormat
from quire.ops.moe import MoeArgs
from quire.ops.routing import RouteArgs
from tests.support.op_cases import Case, Prepared
from tests.support.op_cases.case import by_row
from tests.support.op_cases.logits import SETTINGS, _draw
from tests.support.op_cases.token_by_token import token_by_token

FORMATS = {
    "fp8": WeightFormat("fp8"),
    "int8": WeightFormat("int8"),
    "int8-kept_rows": WeightFormat("int8", rounds_rows=False),
    "int4_g32": WeightFormat("int4", 32),
    "int4_g64-kept_rows": WeightFormat("int4", 64, rounds_rows=False),
    "int4_g128": WeightFormat("int4", 128),
}
BORDERS = ((1, 128, 33), (15, 130, 20), (16, 64, 70), (17, 257, 8), (64, 129, 17), (65, 96, 40))
"""Rows, inputs and outputs around where another tile is chosen and a group or a tile ends."""


def _linear(name: str, rows: int, width: int, out: int) -> Case:
    def prepare(ops, draw) -> Prepared:
        bias = draw.normal(out) if rows % 2 else None
        w = ops.pack_linear(draw.normal(out, width, scale=width**-0.5), bias, FORMATS[name])
        return by_row({"x": draw.normal(rows, width), "w": w}, {"x": 0})

    return Case("linear", f"{name}-{rows}x{width}x{out}", prepare)


def _moe(name: str, rows: int = 5) -> Case:
    def prepare(ops, draw) -> Prepared:
        experts = ops.pack_experts(
            draw.normal(3, 40, 24, scale=0.2), draw.normal(3, 24, 20), stored_as=FORMATS[name]
        )
        args = RouteArgs(2, "softmax", renorm=True)
        chosen, weights = ops.route(draw.normal(rows, 3), args)
        arguments = {"x": draw.normal(rows, 24), "chosen": chosen, "weights": weights}
        return Prepared(arguments | {"experts": experts, "args": MoeArgs()})

    return Case("moe", f"{name}" + f"-{rows}" * (rows != 5), prepare)


ROUNDED = (
    *(_linear(name, *shape) for name in FORMATS for shape in ((3, 70, 40), (66, 33, 5))),
    *(_linear(name, *shape) for name in FORMATS for shape in BORDERS),
    *(_linear(name, 257, 70, 9) for name in ("int8", "int4_g32", "int4_g64-kept_rows")),
    _linear("fp8", 5, 32, 48),
    *(_moe(name) for name in ("fp8", "int8", "int4_g32")),
    _moe("int4_g32", 40),
)


def _wide(op: str, kind: str) -> Case:
    """Rows of several chunks, longer than what is looked at first and than what there is room for:
    where all are equal, cuts are searched in the whole row.
    """
    return replace(_draw(len(SETTINGS), 9001, kind, op=op), name=f"wide-{kind}")


WIDE = tuple(_wide(op, kind) for op in ("draw", "truncate") for kind in ("equal", "normal"))

CHUNKED = (token_by_token(), token_by_token(20))
