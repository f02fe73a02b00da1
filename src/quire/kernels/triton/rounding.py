"""Numbers rounded to a byte with a scale, as `quire.ops.quantized.quantize_rows` rounds them."""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import kernel, power_of_2


@kernel
def rounded(x: tl.tensor, AXIS: tl.constexpr) -> Any:
    """float32 x -> int8 of -127..127, and their scales: x's shape with AXIS of size 1.

    Where a NaN or an infinity is, the scale is NaN.
    """
    magic: tl.constexpr = (
        12_582_912.0  # 1.5 * 2**23: adding and subtracting it rounds, ties to even
    )
    largest = tl.max(tl.abs(x), AXIS, keep_dims=True)
    is_zero = largest < 1e-30
    inverse = tl.where(is_zero, 0.0, 127.0 / tl.where(is_zero, 1.0, largest))
    whole = (x * inverse + magic) - magic
    whole = tl.minimum(tl.maximum(tl.where(whole == whole, whole, 0.0), -127.0), 127.0)
    poison = tl.sum(x * 0.0, AXIS, keep_dims=True)
    return whole.to(tl.int8), tl.where(is_zero, 0.0, largest / 127.0) + poison


@kernel
def _rounded_rows_kernel(
    x: tl.tensor, numbers: tl.tensor, scales: tl.tensor, C: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One row of x [T, C] -> numbers [T, C] and scales [T]."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + row * C + c, c < C, other=0.0).to(tl.float32)
    whole, scale = rounded(values, 1)
    tl.store(numbers + row * C + c, whole, c < C)
    tl.store(scales + row + tl.arange(0, 1)[:, None], scale)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] without gaps -> int8 [T, C] and fp32 scales [T]."""
    numbers = torch.empty_like(x, dtype=torch.int8)
    scales = x.new_empty(len(x), dtype=torch.float32)
    block = power_of_2(x.shape[1])
    warps = min(8, max(1, block // 512))
    _rounded_rows_kernel[(len(x),)](x, numbers, scales, C=x.shape[1], BLOCK=block, num_warps=warps)
    return numbers, scales
