"""Tensors, a rotary table and the norm of a head or a latent, as native kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops.norm import NormWeight
from quire.ops.rotary import RotaryTable


def turns(
    runtime: CpuRuntime, num_tokens: int, rotary: RotaryTable | None
) -> tuple[int, int, int, bool]:
    """A table's address, positions, rotated size and order of pairs; a program keeps it."""
    if rotary is None:
        return (0, 0, 0, False)
    table = rotary.cos_sin
    assert table.dtype is torch.float32 and table.is_contiguous()
    runtime.keep(num_tokens, table)
    return (table.data_ptr(), table.shape[0], rotary.dim, rotary.interleaved)


def norm_of(
    runtime: CpuRuntime, num_tokens: int, n: NormWeight, dtype: torch.dtype
) -> tuple[object, float, int, int]:
    """A norm's kind and eps, the addresses of its weight and bias; a program keeps these."""
    for tensor in (n.weight, n.bias):
        assert tensor is None or (tensor.dtype is dtype and tensor.is_contiguous())
    runtime.keep(num_tokens, n.weight, n.bias)
    kind = getattr(runtime.native.NormKind, n.kind)
    return kind, n.eps, address_of(n.weight), address_of(n.bias)


def address_of(tensor: Tensor | None) -> int:
    """Address of a tensor's data; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_at(x: Tensor) -> tuple[int, ...]:
    """The address of x [T, C] or [T, H, D], and the strides of all axes but the last."""
    return x.data_ptr(), *x.stride()[:-1]
