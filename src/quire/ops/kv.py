"""KV memory of one layer: allocation, and moving whole blocks in and out.

The layout belongs to the provider; all ops that touch it share the format "kv". Whoever moves
blocks (offload, sleep, transfer) sees the neutral form [n, 2, S, K, D], keys then values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.ops.registry import nbytes, op

BlockIds = Sequence[int] | Tensor
"""Block ids, each in 0..N-1 and no id twice."""


class LayerKV(Protocol):
    """One layer's KV memory; contents of slots that nobody wrote are arbitrary, NaN included."""

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlainKV:
    """Plain torch's layout: one lane per slot that holds the keys, then the values of all heads.

    `lanes` is [1 + N*S + 1, 2, K, D]:

    | lane     | what it is for                                                               |
    | -------- | ---------------------------------------------------------------------------- |
    | 0        | zeros for ever: what a padded lane of a gather reads, so that no NaN gets in |
    | 1 + slot | the keys and values of that slot                                             |
    | last     | written for PAD_SLOT (-1 counts from the end of `slots`), never read         |
    """

    lanes: Tensor
    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    slots: Tensor
    keys: Tensor
    values: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.lanes.dtype

    @property
    def nbytes(self) -> int:
        return nbytes(self.lanes)

    @property
    def blocks(self) -> Tensor:
        """[N, S, 2, K, D], a view."""
        n, s = self.num_blocks, self.block_size
        return self.slots[: n * s].view(n, s, 2, self.kv_heads, self.head_dim)

    @property
    def k(self) -> Tensor:
        """Keys [N, S, K, D], a view."""
        return self.blocks[:, :, 0]

    @property
    def v(self) -> Tensor:
        """Values [N, S, K, D], a view."""
        return self.blocks[:, :, 1]


def _allocated_bytes(
    num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, **_: Any
) -> int:
    return 2 * num_blocks * block_size * kv_heads * head_dim * dtype.itemsize


@op(num_bytes=_allocated_bytes, format="kv", binds=("device",))
def allocate_kv(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
) -> PlainKV:
    """KV memory of one layer for num_blocks blocks of block_size tokens; contents are arbitrary."""
    shape = (num_blocks * block_size + 2, 2, kv_heads, head_dim)
    lanes = torch.empty(shape, dtype=dtype, device=device)
    lanes[0].zero_()
    slots = lanes[1:]
    return PlainKV(
        lanes, num_blocks, block_size, kv_heads, head_dim, slots, slots[:, 0], slots[:, 1]
    )


def _block_bytes(kv: LayerKV, block_ids: BlockIds, *_: Any) -> int:
    slots = len(block_ids) * kv.block_size
    return 4 * slots * kv.kv_heads * kv.head_dim * kv.dtype.itemsize


def _index(kv: PlainKV, block_ids: BlockIds) -> Tensor:
    return torch.as_tensor(block_ids, dtype=torch.int64, device=kv.lanes.device)


@op(num_bytes=_block_bytes, format="kv")
def export_kv(kv: PlainKV, block_ids: BlockIds) -> Tensor:
    """A copy of the blocks in the neutral form [n, 2, S, K, D], in the order of block_ids."""
    return kv.blocks.index_select(0, _index(kv, block_ids)).transpose(1, 2).contiguous()


@op(num_bytes=_block_bytes, mutates=("kv",), format="kv")
def import_kv(kv: PlainKV, block_ids: BlockIds, data: Tensor) -> None:
    """Write data [n, 2, S, K, D] (any float dtype, any device) into the blocks."""
    ids = _index(kv, block_ids)
    data = data.to(kv.lanes.device, kv.dtype)
    kv.blocks.index_copy_(0, ids, data.transpose(1, 2))


@op(num_bytes=lambda kv, src_ids, dst_ids: _block_bytes(kv, src_ids), mutates=("kv",), format="kv")
def copy_kv(kv: PlainKV, src_ids: BlockIds, dst_ids: BlockIds) -> None:
    """Copy block src_ids[i] to dst_ids[i]; all are read before the first is written."""
    blocks = kv.blocks
    blocks.index_copy_(0, _index(kv, dst_ids), blocks.index_select(0, _index(kv, src_ids)))


@op(num_bytes=lambda kv, block_ids: _block_bytes(kv, block_ids) // 2, mutates=("kv",), format="kv")
def zero_kv(kv: PlainKV, block_ids: BlockIds) -> None:
    """Fill the blocks with zeros."""
    kv.blocks.index_fill_(0, _index(kv, block_ids), 0)
