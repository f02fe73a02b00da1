"""Weights that a checkpoint stores as codes, as Triton multiplies with them: codes keep their bits,
only their places change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from quire.errors import NotBuiltYet
from quire.kernels.triton.launch import dense, dot_type, power_of_2, shared_memory
from quire.kernels.triton.linear.coded_kernel import coded_product_kernel
from quire.kernels.triton.linear.product_tiles import (
    MORE,
    ProductShape,
    ProductTile,
    float32_tile,
    row_class,
    run_tile,
)
from quire.kernels.triton.linear.rounding import fp8_rows, rounded_rows
from quire.kernels.triton.linear.triton_linear import (
    BUSY_EXPERTS,
    Pairs,
    TritonLinear,
    programs_of,
)
from quire.ops.formats.coded import CodedWeight
from quire.ops.formats.row_rounding import RowRounding
from quire.ops.formats.tables import E2M1
from quire.ops.fp8 import FP8, LARGEST
from quire.ops.quantized import MOST
from quire.ops.segments import Addend

_LEAST_RUN, _MOST_RUN = 16, 128
"""Inputs that are multiplied at once: what tensor cores take at least, and a line of the cache."""
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class TritonCoded:
    """A weight [(E,) out, in] in codes, and its bias [(E,) out].

    codes: "u4", "u8", "e4m3" or "e2m1"; weight: uint8 [(E,) out, pitch], of four bits in pairs of
    runs (`coded_kernel.py`). scales [(E,) G, out]: fp32, with `zeros` int32 or None; or int32 of a
    scale in 16 bits, of the type `scale_type`, below a zero point. group: inputs with one scale, 0:
    all. order, rounding: see `CodedWeight`. is_fixed: a row's bits do not depend on the number of
    rows.
    """

    codes: str
    weight: Tensor
    bias: Tensor | None
    in_features: int
    scales: Tensor
    scale_type: torch.dtype
    zeros: Tensor | None
    group: int
    run: int
    order: Tensor | None = None
    rounding: RowRounding | None = None
    is_fixed: bool = False
    segments: int = 1

    @property
    def out_features(self) -> int:
        return self.weight.shape[-2]

    def multiply(self, x: Tensor, addend: Addend | None = None) -> Tensor:
        """x [*, in] -> [*, out] in x's dtype; with an addend, x is [T, in]."""
        y = self.product(x.reshape(-1, self.in_features), addend)
        return y.view(*x.shape[:-1], self.out_features)

    def partial(self, x: Tensor, peaks: Tensor | None) -> Tensor:
        """Raise NotBuiltYet: no GPUs share such a weight."""
        hint = "Use a checkpoint that is not quantised."
        raise NotBuiltYet("quantization", "stored codes that several GPUs share", hint)

    def tile_rows(self, num_rows: int, dtype: torch.dtype) -> int:
        """Rows that a program multiplies if x has `num_rows` rows of this dtype; for each expert if
        there are experts.
        """
        is_fixed = self.is_fixed or self._operands(dtype) is tl.float32
        return min(MORE, row_class(num_rows, 1, is_fixed=is_fixed))

    def product(
        self,
        x: Tensor,
        addend: Addend | None = None,
        pairs: Pairs | None = None,
        shared: int = 1,
    ) -> Tensor:
        """See `TritonLinear.product`."""
        dtype = x.dtype
        x = dense(x if self.order is None else x.index_select(1, self.order))
        num_rows = len(x) if pairs is None else len(pairs.order)
        out = x.new_empty(num_rows, self.out_features)
        if not num_rows:
            return out
        x, row_scales = (x, None) if self.rounding is None else _rounded(x, self.rounding)
        rows = self.tile_rows(num_rows, dtype) if pairs is None else pairs.rows
        dot = self._operands(dtype)
        tile = self._tile(rows, x, dot)
        programs, grouped = programs_of(pairs, x, num_rows, tile.rows)
        coded_product_kernel[(programs, -(-self.out_features // tile.outputs))](
            x,
            x if row_scales is None else row_scales,
            self.weight,
            self.scales,
            self.scales if self.zeros is None else self.zeros,
            x if self.bias is None else self.bias,
            out,
            *grouped,
            *((self.scales, x) if addend is None else (addend.values, addend.rows)),
            num_rows,
            N=self.out_features,
            C=self.in_features,
            PITCH=self.weight.shape[-1],
            CODES=self.codes,
            SCALES=str(self.scale_type).removeprefix("torch."),
            HAS_ZEROS=self.zeros is not None,
            GROUP=self.group,
            GROUPS=self.scales.shape[-2],
            RUN=self.run,
            ROW_GROUPS=0 if row_scales is None else row_scales.shape[1],
            HAS_BIAS=self.bias is not None,
            HAS_ADDEND=addend is not None,
            GROUPED=pairs is not None,
            SHARED=shared,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            STAGES=tile.stages,
            DOT=dot,
            num_warps=tile.warps,
        )
        return out

    def _operands(self, dtype: torch.dtype) -> Any:
        """The type of operands: the model's, or what holds rows that are 8-bit floats."""
        if self.rounding is not None and self.rounding.to == "e4m3":
            return tl.float16
        return dot_type(dtype)

    def _tile(self, rows: int, x: Tensor, dot: Any) -> ProductTile:
        bits = 4 if self.codes in ("u4", "e2m1") else 8
        depth = self.run * 8 // bits
        shape = ProductShape(
            outputs=self.out_features,
            bits=bits,
            x_bytes=x.itemsize,
            unit=depth,
            experts=1 if self.weight.dim() == 2 else BUSY_EXPERTS,
            shared_memory=shared_memory(x.device),
        )
        return float32_tile(shape) if dot is tl.float32 else run_tile(rows, depth, shape)


def _rounded(x: Tensor, rounding: RowRounding) -> tuple[Tensor, Tensor]:
    """x [T, C] -> numbers [T, C] and scales [T, G] fp32, as `RowRounding.rounded` has them."""
    is_float = rounding.to == "e4m3"
    if rounding.scale is not None:
        most = LARGEST if is_float else MOST
        numbers = (x.float() * (1.0 / rounding.scale)).clamp(-most, most)
        numbers = numbers.to(FP8) if is_float else numbers.round().to(x.dtype)
        return numbers, x.new_full((len(x), 1), rounding.scale, dtype=torch.float32)
    parts = x.view(-1, rounding.group) if rounding.group else x
    numbers, scales = fp8_rows(parts) if is_float else rounded_rows(parts)
    return numbers.view(x.shape), scales.view(len(x), -1)


def obstacle(weight: CodedWeight, device: torch.device) -> str:
    """The reason why the kernel does not multiply with these codes; "" if it does."""
    group = 0 if weight.group >= weight.in_features else weight.group
    if group % _LEAST_RUN:
        return f"groups of {group} inputs"
    if weight.table is not None and weight.table != E2M1:
        return "codes of another table than e2m1"
    rounding = weight.rounding
    if rounding is None:
        return ""
    if rounding.group and (rounding.group != group or weight.in_features % group):
        return "activations that are rounded in other groups"
    if rounding.to == "e4m3" and device.type == "cuda":
        has_fp8 = torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
        return "" if has_fp8 else "activations in 8-bit floats, which this GPU has not"
    return ""


def pack_coded(
    weight: CodedWeight, bias: Tensor | None, *, is_fixed: bool
) -> TritonCoded | TritonLinear:
    """A weight in codes that has no `obstacle`."""
    if weight.is_of_integers:
        numbers = (weight.codes ^ 128).view(torch.int8)
        scales, width = weight.scales.float().flatten(), weight.in_features
        return TritonLinear(
            "int8", numbers, bias, width, scales, rounds_rows=True, is_fixed=is_fixed
        )
    group = 0 if weight.group >= weight.in_features else weight.group
    if weight.are_floats and not group and weight.rounding == RowRounding("e4m3"):
        numbers, scales = weight.codes.view(FP8), weight.scales.float().flatten()
        width = weight.in_features
        return TritonLinear(
            "fp8", numbers, bias, width, scales, rounds_rows=True, is_fixed=is_fixed
        )
    run = _run_of(group or power_of_2(weight.in_features, _LEAST_RUN))
    codes = "e4m3" if weight.are_floats else "e2m1" if weight.table else f"u{weight.bits}"
    scales, zeros = _scales(weight)
    return TritonCoded(
        codes,
        _in_runs(weight, run) if weight.bits == 4 else weight.codes.contiguous(),
        bias,
        weight.in_features,
        scales,
        _scale_type(weight),
        zeros,
        group,
        run,
        weight.order,
        weight.rounding,
        is_fixed,
    )


def pack_coded_experts(
    weights: Sequence[CodedWeight], bias: Tensor | None, *, is_fixed: bool
) -> TritonCoded | TritonLinear | None:
    """Experts' weights as one, bias [E, out]; None if they differ in more than numbers."""
    packed = [pack_coded(weight, None, is_fixed=is_fixed) for weight in weights]
    first = packed[0]
    if any(weight.order is not None for weight in weights) or not _are_alike(packed):
        return None
    tensors: dict[str, Any] = {
        name: torch.stack([getattr(one, name) for one in packed]) for name in ("weight", "scales")
    }
    if isinstance(first, TritonCoded) and first.zeros is not None:
        tensors["zeros"] = torch.stack([one.zeros for one in packed])  # type: ignore[union-attr, misc]
    return replace(first, bias=bias, **tensors)


def _are_alike(packed: Sequence[TritonCoded | TritonLinear]) -> bool:
    def kind(one: TritonCoded | TritonLinear) -> tuple[object, ...]:
        if isinstance(one, TritonLinear):
            return (one.stored,)
        zeros = one.zeros is None
        return one.codes, one.scale_type, one.group, one.run, one.rounding, zeros

    return len({kind(one) for one in packed}) == 1


def _run_of(group: int) -> int:
    """The largest power of two that divides the group, a line of the cache at most."""
    return min(_MOST_RUN, group & -group)


def _scale_type(weight: CodedWeight) -> torch.dtype:
    is_short = weight.scales.dtype in (torch.float16, torch.bfloat16)
    return weight.scales.dtype if is_short else torch.float32


def _scales(weight: CodedWeight) -> tuple[Tensor, Tensor | None]:
    """Scales [G, out] and zero points as `TritonCoded` has them."""
    scales = weight.scales.to(_scale_type(weight)).T.contiguous()
    zeros = None if weight.zeros is None else weight.zeros.T.to(torch.int32).contiguous()
    if scales.dtype is torch.float32:
        return scales, zeros
    middle = torch.full_like(scales, 1 << (weight.bits - 1), dtype=torch.int32)
    upper = (middle if zeros is None else zeros) << 16
    return (scales.view(torch.int16).to(torch.int32) & 0xFFFF) | upper, None


def _in_runs(weight: CodedWeight, run: int) -> Tensor:
    """uint8 [out, in / 2] of neighbours -> [out, P * run]: of P pairs of runs, filled up with
    zeros, the first in the low halves and the second in the high ones.
    """
    codes = weight.codes
    numbers = torch.stack((codes & 15, codes >> 4), 2).flatten(1)[:, : weight.in_features]
    pairs = F.pad(numbers, (0, -weight.in_features % (2 * run))).unflatten(1, (-1, 2, run))
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1).contiguous()
