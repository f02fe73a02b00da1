"""Numbers rounded to a byte with a scale: whole ones as `quire.ops.quantized.quantize_rows` rounds
them, and 8-bit floats as `quire.ops.fp8.fp8_rows`.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import kernel, power_of_2
from quire.ops.fp8 import FP8


@kernel
def rounded(x: tl.tensor, AXIS: tl.constexpr, dtype: tl.constexpr) -> Any:
    """float32 x -> numbers of dtype, int8 of -127..127 or e4m3, and their scales: x's shape with
    AXIS of size 1.

    Where a NaN or an infinity is, the scale is NaN. Divisions are rounded as torch rounds them: a
    GPU's fast ones are not, and a value between two numbers would become the other.
    """
    most: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    largest = tl.max(tl.abs(x), AXIS, keep_dims=True)
    is_zero = largest < 1e-30
    # div_rn: Triton's own division of float32 is not rounded correctly, and bits would differ from
    # torch's
    inverse = tl.where(is_zero, 0.0, tl.div_rn(most, tl.where(is_zero, 1.0, largest)))
    y = x * inverse
    # whole numbers have no NaN: it goes into the scale
    y = tl.minimum(tl.maximum(tl.where(y == y, y, 0.0), -most), most)
    poison = tl.sum(x * 0.0, AXIS, keep_dims=True)
    return _on_grid(y, dtype).to(dtype), tl.where(is_zero, 0.0, tl.div_rn(largest, most)) + poison


@kernel
def rounded_with(x: tl.tensor, scale: tl.tensor, AXIS: tl.constexpr, dtype: tl.constexpr) -> Any:
    """As `rounded`, with a scale that is given: float32 x -> e4m3 numbers, larger ones as the
    type's largest, and their scales.
    """
    y = tl.div_rn(x, x * 0.0 + scale)
    y = tl.minimum(tl.maximum(tl.where(y == y, y, 0.0), -448.0), 448.0)
    poison = tl.sum(x * 0.0, AXIS, keep_dims=True)
    return _on_grid(y, dtype).to(dtype), poison + scale


@kernel
def _on_grid(y: tl.tensor, dtype: tl.constexpr) -> Any:
    """float32 y rounded to a value of dtype that is not beyond its largest, ties to even: the
    conversion that follows is exact, so that it does not matter what it would do with a rest.
    """
    magic: tl.constexpr = (
        12_582_912.0  # 1.5 * 2**23: adding and subtracting it rounds, ties to even
    )
    if dtype == tl.int8:
        step = 1.0
    else:  # 8 steps in a power of two, the last of them down to zero
        power = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power, 0.015625) / 8.0
    return (y + step * magic) - step * magic


@kernel
def _rounded_rows_kernel(
    x: tl.tensor, numbers: tl.tensor, scales: tl.tensor, C: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One row of x [T, C] -> numbers [T, C] and scales [T]."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + row * C + c, c < C, other=0.0).to(tl.float32)
    whole, scale = rounded(values, 1, numbers.dtype.element_ty)
    tl.store(numbers + row * C + c, whole, c < C)
    tl.store(scales + row + tl.arange(0, 1)[:, None], scale)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] without gaps -> e4m3 [T, C] and fp32 scales [T]."""
    return _rows(x, FP8)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] without gaps -> int8 [T, C] and fp32 scales [T]."""
    return _rows(x, torch.int8)


def _rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numbers = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty(len(x), dtype=torch.float32)
    block = power_of_2(x.shape[1])
    warps = min(8, max(1, block // 512))
    if len(x):
        _rounded_rows_kernel[(len(x),)](
            x, numbers, scales, C=x.shape[1], BLOCK=block, num_warps=warps
        )
    return numbers, scales
