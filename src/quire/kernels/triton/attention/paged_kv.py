"""KV memory for Triton kernels: pages of [S, K, D], keys apart from values.

The layout of FlashAttention's paged caches, so that such a kernel can read the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.kv import LARGEST_NUMBER, BlockIds, movable, numbers_and_scales, with_scales
from quire.ops.registry import nbytes


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's KV memory: `memory` [2, N, S, K, D], keys then values; in int8 and e4m3 there are
    `scales` [2, N, S, K] fp32.
    """

    memory: Tensor
    scales: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        return self.memory.shape[1]

    @property
    def block_size(self) -> int:
        return self.memory.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.memory.shape[3]

    @property
    def head_dim(self) -> int:
        return self.memory.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def nbytes(self) -> int:
        return nbytes(self.memory, self.scales)

    @property
    def keys(self) -> Tensor:
        """[N, S, K, D], a view."""
        return self.memory[0]

    @property
    def values(self) -> Tensor:
        """[N, S, K, D], a view."""
        return self.memory[1]


def allocate_kv(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
) -> PagedKV:
    """See `quire.ops.kv.allocate_kv`."""
    shape = (2, num_blocks, block_size, kv_heads, head_dim)
    memory = torch.empty(shape, dtype=dtype, device=device)
    scales = torch.empty(shape[:4], device=device) if dtype in LARGEST_NUMBER else None
    return PagedKV(memory, scales)


def export_kv(kv: PagedKV, block_ids: BlockIds) -> Tensor:
    """See `quire.ops.kv.export_kv`."""
    ids = _index(kv, block_ids)
    data = movable(kv.memory).index_select(1, ids).transpose(0, 1).contiguous().view(kv.dtype)
    if kv.scales is None:
        return data
    return with_scales(data, kv.scales.index_select(1, ids).transpose(0, 1))


def import_kv(kv: PagedKV, block_ids: BlockIds, data: Tensor) -> None:
    """See `quire.ops.kv.import_kv`."""
    ids = _index(kv, block_ids)
    data = data.to(kv.memory.device)
    if kv.scales is None:
        data = data.to(kv.dtype)
    else:
        data, scales = numbers_and_scales(data, kv.dtype)
        kv.scales.index_copy_(1, ids, scales.transpose(0, 1))
    movable(kv.memory).index_copy_(1, ids, movable(data).transpose(0, 1))


def copy_kv(kv: PagedKV, src_ids: BlockIds, dst_ids: BlockIds) -> None:
    """See `quire.ops.kv.copy_kv`."""
    sources, targets = _index(kv, src_ids), _index(kv, dst_ids)
    for part in _parts(kv):
        part.index_copy_(1, targets, part.index_select(1, sources))


def zero_kv(kv: PagedKV, block_ids: BlockIds) -> None:
    """See `quire.ops.kv.zero_kv`."""
    ids = _index(kv, block_ids)
    for part in _parts(kv):
        part.index_fill_(1, ids, 0)


def _index(kv: PagedKV, block_ids: BlockIds) -> Tensor:
    return torch.as_tensor(block_ids, dtype=torch.int64, device=kv.memory.device)


def _parts(kv: PagedKV) -> tuple[Tensor, ...]:
    numbers = movable(kv.memory)
    return (numbers,) if kv.scales is None else (numbers, kv.scales)
