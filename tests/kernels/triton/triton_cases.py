"""Cases beside those of the ops: rounded weights, and attention cut in other ways.

What rounded weights mean is plain torch's definition.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quire.ops import AttentionArgs, WeightFormat
from quire.ops.moe import MoeArgs
from tests.support.op_cases import Case, Prepared
from tests.support.op_cases.case import by_row
from tests.support.op_cases.logits import SETTINGS, _draw
from tests.support.op_cases.paged import PagedRows, PagedShape, _fill, _tables

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
    args = MoeArgs(3, 2, "softmax", renorm=True)

    def prepare(ops, draw) -> Prepared:
        experts = ops.pack_experts(
            draw.normal(3, 40, 24, scale=0.2), draw.normal(3, 24, 20), stored_as=FORMATS[name]
        )
        router = ops.pack_linear(draw.normal(3, 24), None)
        x = draw.normal(rows, 24)
        return Prepared({"x": x, "router": router, "experts": experts, "args": args})

    return Case("moe", f"{name}-softmax" + f"-{rows}" * (rows != 5), prepare)


ROUNDED = (
    *(_linear(name, *shape) for name in FORMATS for shape in ((3, 70, 40), (66, 33, 5))),
    *(_linear(name, *shape) for name in FORMATS for shape in BORDERS),
    *(_linear(name, 257, 70, 9) for name in ("int8", "int4_g32", "int4_g64-kept_rows")),
    _linear("fp8", 5, 32, 48),
    *(_moe(name) for name in ("fp8", "int8", "int4_g32")),
    _moe("int4_g32", 40),
)


def _token_by_token(window: int | None) -> Case:
    """New tokens of a row together; each alone must have the same bits, as decoding gives them."""
    rows = PagedRows(((5, 140), (1, 9), (70, 75)), PagedShape(4, 2, 8, 4), window)

    def prepare(ops, draw) -> Prepared:
        table, pool = _tables(PagedRows(rows.lengths, rows.shape), draw.rng)
        kv = _fill(ops, draw, PagedRows(rows.lengths, rows.shape), table, pool, None)
        q = draw.normal(76, 4, 8)
        args = AttentionArgs(scale=0.6, window=window)

        def arguments(q, starts, lengths, table):
            plan = ops.plan_attention(
                query_start=np.array(starts, dtype=np.int32),
                seq_lens=np.array(lengths, dtype=np.int32),
                block_table=torch.from_numpy(table),
                block_size=4,
                window=window,
            )
            return {"q": q, "kv": kv, "plan": plan, "args": args}

        singles = []
        for row, (new, length) in enumerate(rows.lengths):
            for seen in range(length - new + 1, length + 1):
                at = len(singles)
                one = arguments(q[at : at + 1], [0, 1], [seen], table[row : row + 1])
                singles.append(one)
        return Prepared(arguments(q, rows.query_start, rows.seq_lens, table), tuple(singles))

    return Case("attend", f"token_by_token-window{window}", prepare)


def _wide(op: str, kind: str) -> Case:
    """Rows of several chunks, longer than what is looked at first and than what there is room for:
    where all are equal, cuts are searched in the whole row.
    """
    return replace(_draw(len(SETTINGS), 9001, kind, op=op), name=f"wide-{kind}")


WIDE = tuple(_wide(op, kind) for op in ("draw", "truncate") for kind in ("equal", "normal"))

CHUNKED = (_token_by_token(None), _token_by_token(20))
