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

from quire.kernels.triton.launch import dense, dot_type, kernel, power_of_2
from quire.ops.quantized import QuantizedLinear, WeightFormat, quantize_weight
from quire.ops.registry import nbytes

_TILE = 64
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
def _product_kernel(
    x: Any,
    row_scales: Any,
    w: Any,
    scales: Any,
    bias: Any,
    out: Any,
    order: Any,
    experts: Any,
    starts: Any,
    ends: Any,
    T: int,
    N: tl.constexpr,
    C: tl.constexpr,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Rows of tile program_id(0) times outputs of tile program_id(1) of w [(E,) N, C].

    STORED: "float", "int8" (scales [(E,) N]) or "int4" (two in a byte, scales [(E,) N, G]).
    GROUPED: rows are pairs, `SHARED` of which read the same row of x.
    """
    row_tile = tl.program_id(0)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_output = n < N
    if GROUPED:
        expert = tl.load(experts + row_tile).to(tl.int64)
        at = tl.load(starts + row_tile) + tl.arange(0, TILE)
        is_row = at < tl.load(ends + row_tile)
        target = tl.load(order + at, is_row, other=0).to(tl.int64)
        source = target // SHARED
    else:
        expert = tl.zeros((), tl.int64)
        target = row_tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        is_row = target < T
        source = target
    num_groups: tl.constexpr = (C + GROUP - 1) // GROUP
    width: tl.constexpr = num_groups * GROUP // 2 if STORED == "int4" else C
    w_row = w + (expert * N + n)[None, :].to(tl.int64) * width
    x_row = x + source[:, None] * C
    total = tl.zeros((TILE, TILE), tl.float32)
    exact = tl.zeros((TILE, TILE), tl.int32)
    for start in range(0, C, DEPTH):
        c = start + tl.arange(0, DEPTH)
        is_input = c < C
        x_tile = tl.load(x_row + c[None, :], is_row[:, None] & is_input[None, :], other=0)
        inside = is_output[None, :] & is_input[:, None]
        if STORED == "float":
            w_tile = tl.load(w_row + c[:, None], inside, other=0)
            total += tl.dot(x_tile.to(DOT), w_tile.to(DOT), input_precision="ieee")
        elif STORED == "int8":
            w_tile = tl.load(w_row + c[:, None], inside, other=0)
            exact += tl.dot(x_tile, w_tile, out_dtype=tl.int32)
        else:
            packed = tl.load(w_row + c[:, None] // 2, inside, other=0).to(tl.int32)
            w_tile = ((packed >> (c[:, None] % 2 * 4)) & 15) - 8
            whole = tl.dot(x_tile, w_tile.to(tl.int8), out_dtype=tl.int32).to(tl.float32)
            scale_at = (expert * N + n) * num_groups + start // GROUP
            total += whole * tl.load(scales + scale_at, is_output, other=0.0)[None, :]
    if STORED == "int8":
        scale = tl.load(scales + expert * N + n, is_output, other=0.0)
        total = exact.to(tl.float32) * scale[None, :]
    if STORED != "float":
        total *= tl.load(row_scales + source, is_row, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + expert * N + n, is_output, other=0.0).to(tl.float32)[None, :]
    to = out + target[:, None] * N + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), is_row[:, None] & is_output[None, :])


@kernel
def _quantize_rows_kernel(
    x: Any, q: Any, scales: Any, C: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr
) -> None:
    """One row of x [T, C] -> whole numbers and a scale, as `quire.ops.quantized.quantize_rows`."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    values = tl.load(x + row * C + c, inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    is_zero = largest < 1e-30
    inverse = tl.where(is_zero, 0.0, 127.0 / tl.where(is_zero, 1.0, largest))
    poison = tl.sum(values * 0.0, 0)
    whole = (values * inverse + ROUND) - ROUND
    whole = tl.minimum(tl.maximum(tl.where(whole == whole, whole, 0.0), -127.0), 127.0)
    tl.store(q + row * C + c, whole.to(tl.int8), inside)
    tl.store(scales + row, tl.where(is_zero, 0.0, largest / 127.0) + poison)


_ROUND = 12_582_912.0  # 1.5 * 2**23: adding and subtracting it rounds to a whole number


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """A weight [(E,) out, in] in the model's dtype or in small integers, and its bias [(E,) out].

    stored "int8": `weight` int8 [(E,) out, in], `scales` fp32 [(E,) out]. "int4": two values in a
    byte, the even input in the low half, each 8 too large: uint8 [(E,) out, G * group / 2], scales
    fp32 [(E,) out, G].
    """

    stored: str
    weight: Tensor
    bias: Tensor | None
    in_features: int
    scales: Tensor | None = None
    group: int = 0
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
        y = self._product(x.reshape(-1, self.in_features), None, 1)
        return y.view(*x.shape[:-1], self.out_features)

    def multiply_pairs(self, x: Tensor, pairs: Pairs, shared: int) -> Tensor:
        """Row p // shared of x [*, in] times the weight of p's expert, for each pair p."""
        return self._product(x, pairs, shared)

    def _product(self, x: Tensor, pairs: Pairs | None, shared: int) -> Tensor:
        x = dense(x)
        num_rows = len(x) if pairs is None else len(pairs.order)
        out = x.new_empty(num_rows, self.out_features)
        if not num_rows:
            return out
        row_scales = x
        if self.stored != "float":
            x, row_scales = _quantized_rows(x)
        depth = _depth(self)
        grouped = (x, x, x, x)
        programs = -(-num_rows // _TILE)
        if pairs is not None:
            grouped = (pairs.order, pairs.experts, pairs.starts, pairs.ends)
            programs = len(pairs.experts)
        _product_kernel[(programs, -(-self.out_features // _TILE))](
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
            GROUP=self.group or self.in_features,
            HAS_BIAS=self.bias is not None,
            GROUPED=pairs is not None,
            SHARED=shared,
            TILE=_TILE,
            DEPTH=depth,
            DOT=dot_type(out.dtype),
            num_warps=4,
        )
        return out


def _depth(w: TritonLinear) -> int:
    """Inputs of one step of the product: a whole group of int4, so that it has one scale."""
    if w.stored == "int4":
        return w.group
    return min(_DEPTH, power_of_2(w.in_features, _LEAST_DEPTH))


def _quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.empty_like(x, dtype=torch.int8)
    scales = x.new_empty(len(x), dtype=torch.float32)
    block = power_of_2(x.shape[1])
    _quantize_rows_kernel[(len(x),)](
        x,
        q,
        scales,
        C=x.shape[1],
        BLOCK=block,
        ROUND=_ROUND,
        num_warps=min(8, max(1, block // 512)),
    )
    return q, scales


def pack(
    weight: Tensor, bias: Tensor | None, stored_as: WeightFormat | None, *, is_fixed: bool
) -> TritonLinear:
    """weight [(E,) out, in] and bias [(E,) out] in the format of these kernels."""
    if stored_as is None:
        return TritonLinear("float", weight, bias, weight.shape[-1], is_fixed=is_fixed)
    flat = quantize_weight(weight.reshape(-1, weight.shape[-1]), None, stored_as)
    lead = weight.shape[:-1]
    if stored_as.name == "int8":
        q = flat.q.view(*lead, -1)
        scales = flat.scales.view(lead)
        return TritonLinear("int8", q, bias, weight.shape[-1], scales)
    packed = _two_in_a_byte(flat)
    scales = flat.scales.view(*lead, -1)
    q = packed.view(*lead, -1)
    return TritonLinear("int4", q, bias, weight.shape[-1], scales, stored_as.group)


def _two_in_a_byte(flat: QuantizedLinear) -> Tensor:
    """q [out, G, group] of -8..7 -> uint8 [out, G * group / 2]."""
    values = (flat.q.flatten(1).to(torch.int16) + 8).to(torch.uint8)
    return values[:, 0::2] | (values[:, 1::2] << 4)
