"""Matrix products with weights that Triton computes: small integers, experts, and, where bits must
not depend on the batch, weights in the model's dtype too. All others are torch's (cuBLAS).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from quire.errors import NotBuiltYet
from quire.kernels.triton.gates import activate
from quire.kernels.triton.launch import dense, dot_type, shared_memory
from quire.kernels.triton.linear import nibbles
from quire.kernels.triton.linear.product_kernel import product_kernel
from quire.kernels.triton.linear.product_tiles import (
    MOST_FEW,
    ProductShape,
    ProductTile,
    float32_tile,
    row_class,
    tile_of,
)
from quire.kernels.triton.linear.rounding import fp8_rows, rounded_rows
from quire.ops.fp8 import fp8_weight
from quire.ops.linear import PlainLinear
from quire.ops.quantized import QuantizedLinear, WeightFormat, quantize_weight
from quire.ops.segments import Addend

BUSY_EXPERTS = 4
"""Fewest experts whose weights are read at once: few models choose fewer for a token."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of a product with experts, grouped: `order` [P] are row numbers, expert after expert.

    Program i multiplies at most `rows` rows, `starts[i]` .. of `order` up to `ends[i]`, with expert
    `experts[i]`; a program without work has an empty range.
    """

    order: Tensor
    experts: Tensor
    starts: Tensor
    ends: Tensor
    rows: int


def programs_of(
    pairs: Pairs | None, x: Tensor, num_rows: int, tile_rows: int
) -> tuple[int, tuple[Tensor, ...]]:
    """The number of programs that share the rows of a product, and the map from programs to rows;
    without pairs kernels do not read it, and x stands in.
    """
    if pairs is None:
        return -(-num_rows // tile_rows), (x, x, x, x)
    return len(pairs.experts), (pairs.order, pairs.experts, pairs.starts, pairs.ends)


FEW_FOR_TORCH = MOST_FEW
"""Rows up to which Triton multiplies 8-bit floats."""


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """A weight [(E,) out, in] in the model's dtype or in small integers, and its bias [(E,) out].

    stored "int8": `weight` int8 [(E,) out, in], `scales` fp32 [(E,) out]; "fp8" likewise. "int4":
    two values in a byte, uint8 [(E,) out, P * group], scales int32 [(E,) P, out], P pairs of groups
    (`quire.kernels.triton.linear.nibbles`). rounds_rows: see `WeightFormat`; the others widen whole
    numbers to x's type, which holds them exactly. is_fixed: a row's bits do not depend on the
    number of rows.
    """

    stored: str
    weight: Tensor
    bias: Tensor | None
    in_features: int
    scales: Tensor | None = None
    group: int = 0
    rounds_rows: bool = False
    is_fixed: bool = False
    segments: int = 1

    @property
    def out_features(self) -> int:
        return self.weight.shape[-2]

    def multiply(self, x: Tensor, addend: Addend | None = None) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype; with an addend, x is [T, in]."""
        # torch's is the faster product, whose kernel depends on the number of rows
        if addend is None and self.stored == "float" and not self.is_fixed:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        if addend is None and self._is_for_torch(rows):
            y = self._scaled(rows)
        else:
            y = self.product(rows, addend)
        return y.view(*x.shape[:-1], self.out_features)

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """x [T, in] -> the sums of the segments, fp32 [T, S, out]."""
        if self.stored != "float":
            raise NotBuiltYet(
                "quantization",
                f"{self.stored} weights that several GPUs share",
                "Leave the weights in the model's dtype.",
            )
        width = self.in_features // self.segments
        parts = [slice(i * width, (i + 1) * width) for i in range(self.segments)]
        return torch.stack([self.product(x, part=part) for part in parts], 1)

    def conclude(self, total: Tensor, peaks: Tensor | None) -> Tensor:
        """total [T, out] plus bias."""
        return PlainLinear(self.weight, self.bias).conclude(total, peaks)

    def tile_rows(self, num_rows: int, dtype: torch.dtype) -> int:
        """Rows that a program multiplies if x has `num_rows` rows of this dtype; for each expert if
        there are experts.
        """
        is_fixed = self.is_fixed or self._operands(dtype) is tl.float32
        return row_class(num_rows, 2 * self.group, is_fixed=is_fixed)

    def _is_for_torch(self, x: Tensor) -> bool:
        """Whether torch's product of 8-bit floats takes this weight, and is the faster one: with
        few rows it takes longer than one with weights of 16 bits.
        """
        if self.stored != "fp8" or self.is_fixed or x.dtype is not torch.bfloat16:
            return False
        is_whole = self.in_features % 16 == 0 and self.out_features % 16 == 0
        return is_whole and len(x) > FEW_FOR_TORCH

    def _scaled(self, x: Tensor) -> Tensor:
        numbers, row_scales = fp8_rows(dense(x))
        assert self.scales is not None
        y: Tensor = torch._scaled_mm(
            numbers, self.weight.t(), row_scales[:, None], self.scales[None], out_dtype=x.dtype
        )
        return y if self.bias is None else y.add_(self.bias)

    def product(
        self,
        x: Tensor,
        addend: Addend | None = None,
        pairs: Pairs | None = None,
        shared: int = 1,
        part: slice | None = None,
    ) -> Tensor:
        """x [T, in] -> [T, out], plus an addend of rows; with pairs, row p // shared of x times the
        weight of p's expert, for each pair p. `part`: of the inputs, whose sums are returned in
        fp32.
        """
        x, dtype, weight, bias = dense(x), x.dtype, self.weight, self.bias
        num_rows = len(x) if pairs is None else len(pairs.order)
        out = x.new_empty(num_rows, self.out_features)
        if part is not None:
            x, weight, bias, out = x[:, part], weight[:, part], None, out.float()
        if not num_rows:
            return out
        width, dot, row_scales = x.shape[1], self._operands(dtype), x
        if self.rounds_rows:
            x, row_scales = fp8_rows(x) if self.stored == "fp8" else rounded_rows(x)
        rows = self.tile_rows(num_rows, dtype) if pairs is None else pairs.rows
        tile = self._tile(rows, x, dot)
        programs, grouped = programs_of(pairs, x, num_rows, tile.rows)
        product_kernel[(programs, -(-self.out_features // tile.outputs))](
            x,
            row_scales,
            weight,
            x if self.scales is None else self.scales,
            x if bias is None else bias,
            out,
            *grouped,
            *((row_scales, row_scales) if addend is None else (addend.values, addend.rows)),
            num_rows,
            N=self.out_features,
            C=width,
            STRIDE=self.in_features,
            STORED=self.stored,
            ROUNDED=self.rounds_rows,
            GROUP=self.group,
            HAS_BIAS=bias is not None,
            HAS_ADDEND=addend is not None,
            GROUPED=pairs is not None,
            SHARED=shared,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            STAGES=tile.stages,
            DOT=dot,
            SUM=tl.int32 if dot is tl.int8 else tl.float32,
            PTX=nibbles.ptx_for(dot) if self.stored == "int4" else None,
            num_warps=tile.warps,
        )
        return out

    def _operands(self, dtype: torch.dtype) -> Any:
        """The type of the operands of a product with rows of this type: what holds the stored
        numbers exactly.
        """
        if self.rounds_rows:
            return tl.float16 if self.stored == "fp8" else tl.int8
        return dot_type(dtype)

    def _tile(self, rows: int, x: Tensor, dot: Any) -> ProductTile:
        shape = ProductShape(
            outputs=self.out_features,
            bits=4 if self.stored == "int4" else 8 * self.weight.itemsize,
            x_bytes=x.itemsize,
            unit=2 * self.group or 1,
            experts=1 if self.weight.dim() == 2 else BUSY_EXPERTS,
            shared_memory=shared_memory(x.device),
        )
        return float32_tile(shape) if dot is tl.float32 else tile_of(rows, shape)


def hidden(
    x: Tensor, up: TritonLinear, act: str, gated: bool, addend: Addend | None = None
) -> Tensor:
    """See `quire.ops.linear.hidden`."""
    return activate(up.multiply(x, addend), act, gated=gated)


def pack(
    weight: Tensor,
    bias: Tensor | None,
    stored_as: WeightFormat | None,
    peaks: Tensor | None = None,
    *,
    is_fixed: bool,
) -> TritonLinear:
    """weight [(E,) out, in] and bias [(E,) out] in the format of these kernels; peaks [out] of a
    single weight: see `pack_linear`.
    """
    if stored_as is None:
        return TritonLinear("float", weight, bias, weight.shape[-1], is_fixed=is_fixed)
    if stored_as.name == "fp8":
        return _pack_fp8(weight, bias, peaks, is_fixed=is_fixed)
    rows = weight.reshape(-1, weight.shape[-1])
    flat = quantize_weight(rows, None, stored_as, peaks=peaks)
    if stored_as.name == "int4":
        return _pack_int4(weight, bias, flat, stored_as, is_fixed=is_fixed)
    return TritonLinear(
        "int8",
        flat.q.view(weight.shape),
        bias,
        weight.shape[-1],
        flat.scales.view(weight.shape[:-1]),
        rounds_rows=stored_as.rounds_rows,
        is_fixed=is_fixed,
    )


def _pack_int4(
    weight: Tensor,
    bias: Tensor | None,
    flat: QuantizedLinear,
    stored_as: WeightFormat,
    *,
    is_fixed: bool,
) -> TritonLinear:
    *lead, outputs, width = weight.shape
    bytes, scales = nibbles.packed(flat)
    scales = scales.unflatten(1, (-1, outputs)).transpose(0, 1).contiguous()  # an expert's apart
    return TritonLinear(
        "int4",
        bytes.view(*lead, outputs, -1),
        bias,
        width,
        scales.view(*lead, -1, outputs),
        stored_as.group,
        stored_as.rounds_rows,
        is_fixed,
    )


def _pack_fp8(
    weight: Tensor, bias: Tensor | None, peaks: Tensor | None, *, is_fixed: bool
) -> TritonLinear:
    flat = fp8_weight(weight.reshape(-1, weight.shape[-1]), None, peaks=peaks)
    numbers, scales = flat.numbers.view(weight.shape), flat.scales.view(weight.shape[:-1])
    width = weight.shape[-1]
    return TritonLinear("fp8", numbers, bias, width, scales, rounds_rows=True, is_fixed=is_fixed)
