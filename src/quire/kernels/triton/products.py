"""Matrix products with weights that Triton computes: small integers, experts, and, where bits must
not depend on the batch, weights in the model's dtype too. All others are torch's (cuBLAS).
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import FLOAT32_WARPS, dense, dot_type, kernel, power_of_2
from quire.kernels.triton.rounding import fp8_rows, rounded_rows
from quire.ops.fp8 import fp8_weight
from quire.ops.quantized import QuantizedLinear, WeightFormat, quantize_weight
from quire.ops.registry import nbytes

TILE = 64
"""Rows and outputs of a program. Fixed, so that a row's bits do not depend on their number."""

_DEPTH = 64
"""Inputs that a program multiplies at once."""

_LEAST_DEPTH = 32
"""Of a product of whole numbers."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of a product with experts, grouped: `order` [P] are row numbers, expert after expert.

    Program i multiplies rows `starts[i]` .. of `order`, up to `ends[i]`, with expert `experts[i]`;
    a program without work has an empty range.
    """

    order: Tensor
    experts: Tensor
    starts: Tensor
    ends: Tensor


@kernel
def _weight_tile(w_row: tl.tensor, c: tl.tensor, inside: tl.tensor, STORED: tl.constexpr) -> Any:
    """Inputs c [DEPTH] of the outputs whose rows begin at w_row [1, TILE] -> [DEPTH, TILE]."""
    if STORED == "int4":
        packed = tl.load(w_row + c[:, None] // 2, inside, other=0).to(tl.int32)
        return (((packed >> (c[:, None] % 2 * 4)) & 15) - 8).to(tl.int8)
    else:  # a second path for the compiler, not for Python
        return tl.load(w_row + c[:, None], inside, other=0.0 if STORED == "fp8" else 0)


@kernel
def _tile_product(x: tl.tensor, w: tl.tensor, ROUNDED: tl.constexpr, DOT: tl.constexpr) -> Any:
    """x [TILE, DEPTH] times w [DEPTH, TILE]: of whole numbers exact, else in float32."""
    if ROUNDED:
        return tl.dot(x, w, out_dtype=tl.int32)
    else:  # a second path for the compiler, not for Python
        return tl.dot(x.to(DOT), w.to(DOT), input_precision="ieee")


@kernel
def _rows_of_program(
    order: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    T: int,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """The expert of tile program_id(0), the rows of the output, of the input, and which exist."""
    tile = tl.program_id(0)
    lane = tl.arange(0, TILE)
    if GROUPED:
        at = tl.load(starts + tile) + lane
        is_row = at < tl.load(ends + tile)
        target = tl.load(order + at, is_row, other=0).to(tl.int64)
        return tl.load(experts + tile).to(tl.int64), target, target // SHARED, is_row
    else:  # a second path for the compiler, not for Python
        target = tile.to(tl.int64) * TILE + lane
        return tl.zeros((), tl.int64), target, target, target < T


@kernel
def _product_kernel(
    x: tl.tensor,
    row_scales: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    T: int,
    N: tl.constexpr,
    C: tl.constexpr,
    STORED: tl.constexpr,
    ROUNDED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
) -> None:
    """Rows of tile program_id(0) times outputs of tile program_id(1) of w [(E,) N, C].

    STORED: "float", "int8" or "fp8" (scales [(E,) N]), or "int4" (two in a byte, scales
    [(E,) N, G]). ROUNDED: x is numbers of the same kind with row_scales. GROUPED: rows are pairs,
    `SHARED` of which read the same row of x. SUM: the type of the sums over tiles.
    """
    expert, target, source, is_row = _rows_of_program(
        order, experts, starts, ends, T, GROUPED, SHARED, TILE
    )
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_output = n < N
    num_groups: tl.constexpr = (C + GROUP - 1) // GROUP
    width: tl.constexpr = num_groups * GROUP // 2 if STORED == "int4" else C
    w_row = w + (expert * N + n)[None, :] * width
    x_row = x + source[:, None] * C
    sums = tl.zeros((TILE, TILE), SUM)
    for start in range(0, C, DEPTH):
        c = start + tl.arange(0, DEPTH)
        is_input = c < C
        is_there = is_row[:, None] & is_input[None, :]
        x_tile = tl.load(x_row + c[None, :], is_there, other=0.0 if STORED == "fp8" else 0)
        w_tile = _weight_tile(w_row, c, is_input[:, None] & is_output[None, :], STORED)
        part = _tile_product(x_tile, w_tile, ROUNDED and STORED != "fp8", DOT)
        if STORED == "int4":
            scale_at = (expert * N + n) * num_groups + start // GROUP
            part = part.to(tl.float32) * tl.load(scales + scale_at, is_output, other=0.0)[None, :]
        sums += part
    y = sums.to(tl.float32)
    if STORED == "int8" or STORED == "fp8":
        y *= tl.load(scales + expert * N + n, is_output, other=0.0)[None, :]
    if ROUNDED:
        y *= tl.load(row_scales + source, is_row, other=0.0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias + expert * N + n, is_output, other=0.0).to(tl.float32)[None, :]
    to = out + target[:, None] * N + n[None, :]
    tl.store(to, y.to(out.dtype.element_ty), is_row[:, None] & is_output[None, :])


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """A weight [(E,) out, in] in the model's dtype or in small integers, and its bias [(E,) out].

    stored "int8": `weight` int8 [(E,) out, in], `scales` fp32 [(E,) out]; "fp8" likewise. "int4":
    two values in a byte, the even input in the low half, each 8 too large: uint8 [(E,) out, G *
    group / 2], scales fp32 [(E,) out, G]. rounds_rows: see `WeightFormat`; the others widen whole
    numbers to x's type, which holds them exactly.
    """

    stored: str
    weight: Tensor
    bias: Tensor | None
    in_features: int
    scales: Tensor | None = None
    group: int = 0
    rounds_rows: bool = False
    is_fixed: bool = False

    @property
    def out_features(self) -> int:
        return self.weight.shape[-2]

    @property
    def nbytes(self) -> int:
        return nbytes(self.weight, self.bias, self.scales)

    def multiply(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype."""
        if self.stored == "float" and not self.is_fixed:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        y = self._scaled(rows) if self._is_for_torch(x.dtype) else self._product(rows, None, 1)
        return y.view(*x.shape[:-1], self.out_features)

    def multiply_pairs(self, x: Tensor, pairs: Pairs, shared: int) -> Tensor:
        """Row p // shared of x [*, in] times the weight of p's expert, for each pair p."""
        return self._product(x, pairs, shared)

    def _is_for_torch(self, dtype: torch.dtype) -> bool:
        """Whether torch's product of 8-bit floats takes this weight."""
        is_whole = self.in_features % 16 == 0 and self.out_features % 16 == 0
        suits = self.stored == "fp8" and not self.is_fixed
        return suits and is_whole and dtype is torch.bfloat16

    def _scaled(self, x: Tensor) -> Tensor:
        numbers, row_scales = fp8_rows(dense(x))
        assert self.scales is not None
        y: Tensor = torch._scaled_mm(
            numbers, self.weight.t(), row_scales[:, None], self.scales[None], out_dtype=x.dtype
        )
        return y if self.bias is None else y.add_(self.bias)

    def _product(self, x: Tensor, pairs: Pairs | None, shared: int) -> Tensor:
        x = dense(x)
        num_rows = len(x) if pairs is None else len(pairs.order)
        out = x.new_empty(num_rows, self.out_features)
        if not num_rows:
            return out
        dtype, row_scales = x.dtype, x
        if self.rounds_rows:
            x, row_scales = fp8_rows(x) if self.stored == "fp8" else rounded_rows(x)
        grouped = (x, x, x, x)
        programs = -(-num_rows // TILE)
        if pairs is not None:
            grouped = (pairs.order, pairs.experts, pairs.starts, pairs.ends)
            programs = len(pairs.experts)
        is_float32 = dtype is torch.float32 and not self.rounds_rows
        _product_kernel[(programs, -(-self.out_features // TILE))](
            x,
            row_scales,
            self.weight,
            x if self.scales is None else self.scales,
            x if self.bias is None else self.bias,
            out,
            *grouped,
            num_rows,
            N=self.out_features,
            C=self.in_features,
            STORED=self.stored,
            ROUNDED=self.rounds_rows,
            GROUP=self.group or self.in_features,
            HAS_BIAS=self.bias is not None,
            GROUPED=pairs is not None,
            SHARED=shared,
            TILE=TILE,
            DEPTH=_depth(self),
            DOT=dot_type(dtype),
            SUM=tl.int32 if self.stored == "int8" and self.rounds_rows else tl.float32,
            num_warps=FLOAT32_WARPS if is_float32 else 4,
        )
        return out


def _depth(w: TritonLinear) -> int:
    """Inputs of one step of the product: a whole group of int4, so that it has one scale."""
    if w.stored == "int4":
        return w.group
    return min(_DEPTH, power_of_2(w.in_features, _LEAST_DEPTH))


def pack(
    weight: Tensor, bias: Tensor | None, stored_as: WeightFormat | None, *, is_fixed: bool
) -> TritonLinear:
    """weight [(E,) out, in] and bias [(E,) out] in the format of these kernels."""
    if stored_as is None:
        return TritonLinear("float", weight, bias, weight.shape[-1], is_fixed=is_fixed)
    if stored_as.name == "fp8":
        return _pack_fp8(weight, bias, is_fixed=is_fixed)
    flat = quantize_weight(weight.reshape(-1, weight.shape[-1]), None, stored_as)
    lead = weight.shape[:-1]
    is_int8 = stored_as.name == "int8"
    return TritonLinear(
        stored_as.name,
        (flat.q if is_int8 else _two_in_a_byte(flat)).view(*lead, -1),
        bias,
        weight.shape[-1],
        flat.scales.view(lead if is_int8 else (*lead, -1)),
        stored_as.group,
        stored_as.rounds_rows,
    )


def _pack_fp8(weight: Tensor, bias: Tensor | None, *, is_fixed: bool) -> TritonLinear:
    flat = fp8_weight(weight.reshape(-1, weight.shape[-1]), None)
    numbers, scales = flat.numbers.view(weight.shape), flat.scales.view(weight.shape[:-1])
    width = weight.shape[-1]
    return TritonLinear("fp8", numbers, bias, width, scales, rounds_rows=True, is_fixed=is_fixed)


def _two_in_a_byte(flat: QuantizedLinear) -> Tensor:
    """q [out, G, group] of -8..7 -> uint8 [out, G * group / 2]."""
    values = (flat.q.flatten(1).to(torch.int16) + 8).to(torch.uint8)
    return values[:, 0::2] | (values[:, 1::2] << 4)
