"""KV memory for Triton kernels: pages of [S, K, D], keys apart from values.

The layout of FlashAttention's paged caches, so that such a kernel can read the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.kv import (
    LARGEST_NUMBER,
    BlockIds,
    BlockShape,
    KVShape,
    PlainMemory,
    ids_on,
    movable,
    numbers_and_scales,
    page_bytes,
    plain_bytes,
    plain_memory,
    with_null_block,
    with_scales,
)


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's KV memory: `memory` [2, N, S, K, D], keys then values; in int8 and e4m3 there are
    `scales` [2, N, S, K] fp32. A token's keys or values are contiguous, and tokens of a page follow
    each other. Where layers share memory, the values of a page come right after its keys.
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
    def page_slots(self) -> int:
        """Slots from one page to the next: S, or more where layers share memory."""
        return self.memory.stride(1) // self.memory.stride(2)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(movable(self.memory)) + (() if self.scales is None else tuple(self.scales))

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
    return with_null_block(PagedKV(memory, scales))


def allocate_shared_kv(
    num_blocks: int, shapes: Sequence[BlockShape], dtype: torch.dtype, *, device: torch.device
) -> tuple[PagedKV | PlainMemory, ...]:
    """See `quire.ops.kv.allocate_shared_kv`."""
    sizes, slots = [], []
    for shape in shapes:
        if not isinstance(shape, KVShape):
            sizes.append(plain_bytes(shape, dtype))
        else:
            slots.append(shape.kv_heads * shape.head_dim * dtype.itemsize)
            sizes.append(2 * shape.block_size * slots[-1])
    page = page_bytes(sizes, slots)
    pages = torch.empty((num_blocks, page), dtype=torch.uint8, device=device)

    def view(shape: BlockShape) -> PagedKV | PlainMemory:
        if not isinstance(shape, KVShape):
            return plain_memory(pages, shape, dtype)
        numbers = pages.view(dtype).view(num_blocks, -1, shape.kv_heads, shape.head_dim)
        scales = None
        if dtype in LARGEST_NUMBER:
            scales = torch.empty(numbers.shape[:3], device=device)
        return PagedKV(_halves(numbers, shape), None if scales is None else _halves(scales, shape))

    return tuple(with_null_block(view(shape)) for shape in shapes)


def _halves(slots: Tensor, shape: KVShape) -> Tensor:
    """Slots of pages [N, Q, ...] as those of keys and of values [2, N, S, ...], a view."""
    size = shape.block_size
    both = slots[:, : 2 * size].unflatten(1, (2, size))
    return both.transpose(0, 1)


def export_kv(kv: PagedKV, block_ids: BlockIds) -> Tensor:
    """See `quire.ops.kv.export_kv`."""
    ids = ids_on(block_ids, kv.memory.device)
    data = movable(kv.memory).index_select(1, ids).transpose(0, 1).contiguous().view(kv.dtype)
    if kv.scales is None:
        return data
    return with_scales(data, kv.scales.index_select(1, ids).transpose(0, 1))


def import_kv(kv: PagedKV, block_ids: BlockIds, data: Tensor) -> None:
    """See `quire.ops.kv.import_kv`."""
    ids = ids_on(block_ids, kv.memory.device)
    data = data.to(kv.memory.device)
    if kv.scales is None:
        data = data.to(kv.dtype)
    else:
        data, scales = numbers_and_scales(data, kv.dtype)
        kv.scales.index_copy_(1, ids, scales.transpose(0, 1))
    movable(kv.memory).index_copy_(1, ids, movable(data).transpose(0, 1))
