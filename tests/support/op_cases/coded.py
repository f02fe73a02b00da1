"""Cases of products with weights that are stored as codes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from quire.ops import CodedWeight, MoeArgs
from quire.ops.catalog import Ops
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared, by_row
from tests.support.op_cases.products import addend_of, with_addend

TABLE = tuple((i * 7 % 16 - 5) / 4 for i in range(16))
"""Sixteen numbers in no order."""


def coded_weight(
    draw: Draw,
    out: int,
    width: int,
    bits: Literal[4, 8] = 4,
    group: int = 8,
    *,
    zeros: bool = False,
    order: bool = False,
    scales: torch.dtype = torch.float16,
    floats: bool = False,
    table: tuple[float, ...] | None = None,
) -> CodedWeight:
    """Codes over their whole range, but for the NaNs of floats; scales are numbers of few bits,
    which every type holds, of either sign and sometimes nothing.
    """
    rng, groups = draw.rng, -(-width // group)
    found = rng.integers(-40, 41, (out, groups)).astype(np.float32) / 512
    codes = rng.integers(0, 256, (out, -(-width * bits // 8)), dtype=np.uint8)
    if floats:
        codes[codes % 128 == 127] = 0
    return CodedWeight(
        bits,
        width,
        group,
        draw.exact(codes),
        draw.exact(found).to(scales),
        draw.exact(rng.integers(0, 1 << bits, (out, groups), dtype=np.uint8)) if zeros else None,
        draw.integers(rng.permutation(width)) if order else None,
        floats,
        table=table,
    )


def _linear(
    rows: int,
    width: int,
    out: int,
    bits: Literal[4, 8] = 4,
    group: int = 8,
    *,
    segments: int = 1,
    bias: bool = False,
    addend: bool = False,
    zeros: bool = False,
    order: bool = False,
    scales: torch.dtype = torch.float16,
    floats: bool = False,
    table: tuple[float, ...] | None = None,
    op: str = "linear",
    bench: str = "",
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        weight = coded_weight(
            draw,
            out,
            width,
            bits,
            group,
            zeros=zeros,
            order=order,
            scales=scales,
            floats=floats,
            table=table,
        )
        packed = ops.pack_linear(weight, draw.normal(out) if bias else None, segments=segments)
        arguments: Arguments = {"x": draw.normal(rows, width), "w": packed}
        if addend:
            return with_addend(arguments, addend_of(draw, rows, out))
        return Prepared(arguments) if bench else by_row("linear", arguments)

    traits = (
        "-floats" * floats
        + "-table" * (table is not None)
        + "-zeros" * zeros
        + "-order" * order
        + "-bias" * bias
        + "-addend" * addend
    )
    kind = f"codes{bits}-g{group}-{str(scales).removeprefix('torch.')}{traits}"
    name = f"{kind}-{rows}x{width}x{out}{f'-{segments}segments' * (segments > 1)}"
    return Case(op, bench or name, prepare, is_bench=bool(bench))


def _hidden(rows: int, width: int, ffn: int, *, gated: bool) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        weight = coded_weight(draw, ffn * (1 + gated), width, zeros=True)
        packed = ops.pack_linear(weight, None, gated=gated)
        x = draw.normal(rows, width)
        return by_row("hidden", {"x": x, "up": packed, "act": "silu", "gated": gated})

    return Case("hidden", f"codes4-silu{'-gated' * gated}-{rows}x{width}x{ffn}", prepare)


def _moe(rows: int, experts: int) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        width, ffn = 24, 16
        chosen = np.array([draw.rng.permutation(experts)[:2] for _ in range(rows)], np.int32)
        up = [coded_weight(draw, 2 * ffn, width, zeros=e == 1) for e in range(experts)]
        down = [coded_weight(draw, width, ffn, 8) for _ in range(experts)]
        return by_row(
            "moe",
            {
                "x": draw.normal(rows, width),
                "chosen": draw.exact(chosen),
                "weights": draw.wide(draw.rng.random((rows, 2))),
                "experts": ops.pack_experts(up, down, gated=True),
                "args": MoeArgs(),
            },
        )

    return Case("moe", f"codes-{rows}", prepare)


CASES = (
    *(_linear(rows, 24, 40) for rows in (0, 1, 2, 5)),
    *(_linear(13, 96, 33, bits, 32, zeros=True, bias=True) for bits in (4, 8)),
    *(_linear(3, 24, 9, bits, 24) for bits in (4, 8)),  # one group, in pieces
    *(_linear(4, width, 34, bits, 16) for bits in (4, 8) for width in (37, 150)),  # a part of one
    _linear(2, 272, 5, 4, 128, zeros=True),
    _linear(5, 64, 9, 4, 16, order=True, zeros=True),
    _linear(5, 64, 9, 8, 64, order=True, scales=torch.bfloat16),
    _linear(5, 64, 40, 4, 32, scales=torch.bfloat16),
    _linear(3, 64, 40, 4, 16, scales=torch.float32, zeros=True),
    _linear(7, 24, 40, addend=True, zeros=True, bias=True),
    *(_linear(5, 256, 9, 4, 32, segments=n, bias=True, zeros=True) for n in (2, 4)),
    _linear(3, 256, 35, 8, 64, segments=4, op="linear_partial"),
    _linear(3, 128, 35, 4, 32, segments=4, zeros=True, op="linear_partial"),
    *(_hidden(6, 24, 40, gated=gated) for gated in (True, False)),
    *(_linear(rows, 24, 40, 8, floats=True) for rows in (1, 5)),
    _linear(4, 150, 34, 8, 64, floats=True, scales=torch.float32, bias=True),
    _linear(3, 256, 35, 8, 64, segments=4, floats=True, op="linear_partial"),
    *(_linear(rows, 24, 40, table=TABLE, scales=torch.bfloat16) for rows in (1, 5)),
    _linear(4, 150, 34, 4, 16, table=TABLE, scales=torch.float32, bias=True),
    _moe(7, 3),
    *(
        _linear(rows, 1024, 4096, bits, 128, zeros=bits == 4, bench=f"codes{bits}_qkv_0.6b_{rows}")
        for bits in (4, 8)
        for rows in (1, 8, 512)
    ),
)
