"""Cases of rounded weights, beside those of the ops: what they mean is plain torch's definition."""

from __future__ import annotations

from quire.ops import WeightFormat
from quire.ops.cases import Case, Prepared
from quire.ops.cases.case import by_row
from quire.ops.moe import MoeArgs

FORMATS = {
    "fp8": WeightFormat("fp8"),
    "int8": WeightFormat("int8"),
    "int8-kept_rows": WeightFormat("int8", rounds_rows=False),
    "int4_g32": WeightFormat("int4", 32),
    "int4_g64-kept_rows": WeightFormat("int4", 64, rounds_rows=False),
}


def _linear(name: str, rows: int, width: int, out: int) -> Case:
    def prepare(ops, draw) -> Prepared:
        bias = draw.normal(out) if rows % 2 else None
        w = ops.pack_linear(draw.normal(out, width, scale=width**-0.5), bias, FORMATS[name])
        return by_row({"x": draw.normal(rows, width), "w": w}, {"x": 0})

    return Case("linear", f"{name}-{rows}x{width}x{out}", prepare)


def _moe(name: str) -> Case:
    args = MoeArgs(3, 2, "softmax", renorm=True)

    def prepare(ops, draw) -> Prepared:
        experts = ops.pack_experts(
            draw.normal(3, 40, 24, scale=0.2), draw.normal(3, 24, 20), stored_as=FORMATS[name]
        )
        router = ops.pack_linear(draw.normal(3, 24), None)
        x = draw.normal(5, 24)
        return Prepared({"x": x, "router": router, "experts": experts, "args": args})

    return Case("moe", f"{name}-softmax", prepare)


ROUNDED = tuple(
    case for name in FORMATS for case in (_linear(name, 3, 70, 40), _linear(name, 66, 33, 5))
) + (_linear("fp8", 5, 32, 48), _moe("fp8"), _moe("int8"), _moe("int4_g32"))
