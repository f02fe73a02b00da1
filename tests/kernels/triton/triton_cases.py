"""Cases beside those of the ops: rounded weights, and attention cut in other ways.

What rounded weights mean is plain torch's definition.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.ops import WeightFormat
from quire.ops.formats.row_rounding import RowRounding
from quire.ops.formats.tables import E2M1
from quire.ops.moe import MoeArgs
from quire.ops.routing import RouteArgs
from tests.support.op_cases import Case, Prepared
from tests.support.op_cases.case import by_row
from tests.support.op_cases.coded import _linear as coded_linear
from tests.support.op_cases.coded import coded_weight
from tests.support.op_cases.latent import Sizes
from tests.support.op_cases.latent import _attend as latent_case
from tests.support.op_cases.latent import token_by_token as latent_token_by_token
from tests.support.op_cases.logits import SETTINGS, _draw
from tests.support.op_cases.token_by_token import token_by_token

BF16, FLOAT = torch.bfloat16, torch.float32
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
        return by_row("linear", {"x": draw.normal(rows, width), "w": w})

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

CHUNKED = (
    token_by_token(),
    token_by_token(20),
    latent_token_by_token(),
    latent_case("by_token", ((3, 70), (1, 9), (5, 7)), Sizes(20, 40, 8, 16), by_token=True),
    latent_case("parts", ((2, 7), (1, 20)), Sizes(3, 130, 8, 4)),
)
"""`parts`: latents whose columns several programs share out in float32."""


def _coded_moe(name: str, rows: int, width: int, ffn: int, bias: bool = False, **form) -> Case:
    def prepare(ops, draw) -> Prepared:
        args = RouteArgs(2, "softmax", renorm=True)
        chosen, weights = ops.route(draw.normal(rows, 3), args)
        up = [coded_weight(draw, 2 * ffn, width, **form) for _ in range(3)]
        down = [coded_weight(draw, width, ffn, **form) for _ in range(3)]
        biases = (draw.normal(3, 2 * ffn), draw.normal(3, width)) if bias else ()
        arguments = {"x": draw.normal(rows, width), "chosen": chosen, "weights": weights}
        experts = ops.pack_experts(up, down, *biases)
        return Prepared(arguments | {"experts": experts, "args": MoeArgs()})

    return Case("moe", f"codes-{name}-{rows}", prepare)


def _rounded_rows(
    name: str, rows: int, width: int, out: int, rounding: RowRounding, **form
) -> Case:
    def prepare(ops, draw) -> Prepared:
        weight = replace(coded_weight(draw, out, width, **form), rounding=rounding)
        packed = ops.pack_linear(weight, draw.normal(out))
        return by_row("linear", {"x": draw.normal(rows, width), "w": packed})

    return Case("linear", f"codes-{name}-{rows}x{width}x{out}", prepare)


MX, NV = ({"table": E2M1, "group": n, "scales": s} for n, s in ((32, BF16), (16, FLOAT)))
BLOCKS = {"bits": 8, "floats": True, "group": 64, "scales": FLOAT}
ROW = {"bits": 8, "floats": True, "group": 1 << 20, "scales": FLOAT}
CODED = (
    coded_linear(17, 130, 33, 4, 64, zeros=True, bias=True),
    coded_linear(3, 200, 9, 8, 48, scales=BF16),
    coded_linear(5, 96, 40, 4, 32, addend=True, zeros=True),
    coded_linear(5, 150, 34, **MX),
    coded_linear(2, 64, 9, **NV),
    coded_linear(65, 256, 8, 8, 128, floats=True, scales=BF16),
)
"""Weights in codes of the forms that checkpoints have, beside those of the ops' own cases."""
CODED_ROUNDED = (
    _rounded_rows("blocks", 5, 192, 40, RowRounding("e4m3", 64), **BLOCKS),
    _rounded_rows("blocks-static", 4, 130, 33, RowRounding("e4m3", scale=0.02), **BLOCKS),
    _rounded_rows("per_token", 5, 64, 48, RowRounding("e4m3"), **ROW),
    _rounded_rows("whole", 5, 70, 33, RowRounding("int8"), bits=8, group=70),
    _rounded_rows("whole-static", 3, 70, 9, RowRounding("int8", scale=0.03), bits=8, group=70),
    _rounded_rows("groups", 5, 96, 33, RowRounding("int8"), bits=4, group=32, zeros=True),
    _coded_moe("awq", 5, 32, 16, group=16, zeros=True),
    _coded_moe("mxfp4", 20, 40, 32, bias=True, **MX),
    _coded_moe("fp8", 4, 64, 64, **BLOCKS),
)
"""Those whose activations are rounded, too, and experts: plain torch's definition says what they
are."""
