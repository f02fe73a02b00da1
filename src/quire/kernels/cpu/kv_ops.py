"""KV memory of the native kernels: huge pages, keys transposed in tiles of 16, int8 if wanted.

csrc/kernels/kernels.hpp describes the layout. Moving whole blocks in and out is rare; torch does it
through views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from quire.errors import NotBuiltYet
from quire.kernels.cpu.runtime import NativeOps, huge_tensor
from quire.ops.fp8 import FP8
from quire.ops.kv import (
    SCALE_BYTES,
    BlockIds,
    BlockShape,
    KVShape,
    PlainMemory,
    copy_kv,
    ids_on,
    numbers_and_scales,
    page_bytes,
    plain_bytes,
    plain_memory,
    with_scales,
    zero_kv,
)

LANES = 16
LINE = 64


def _to_line(count: int) -> int:
    return -(-count // LINE) * LINE


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Offsets of the parts of one KV head in a block, in bytes from the head's beginning.

    Keys first: tiles of `tile` slots, [Dp / pack, tile, pack] each, where Dp is head_dim rounded up
    to `pack`. Then values [S, D]; for int8, fp32 scales [S] of keys and of values; then `padding`,
    where blocks of another shape in the same memory are larger.
    """

    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    padding: int = 0

    @property
    def is_int8(self) -> bool:
        return self.dtype is torch.int8

    @property
    def pack(self) -> int:
        return {torch.bfloat16: 2, torch.int8: 4}.get(self.dtype, 1)

    @property
    def tile(self) -> int:
        return LANES if self.block_size % LANES == 0 else self.block_size

    @property
    def packed_dim(self) -> int:
        return -(-self.head_dim // self.pack)

    @property
    def values(self) -> int:
        return _to_line(self.block_size * self.packed_dim * self.pack * self.dtype.itemsize)

    @property
    def key_scales(self) -> int:
        return self.values + _to_line(self.block_size * self.head_dim * self.dtype.itemsize)

    @property
    def value_scales(self) -> int:
        return self.key_scales + _to_line(self.block_size * SCALE_BYTES)

    @property
    def head_bytes(self) -> int:
        if not self.is_int8:
            return self.key_scales + self.padding
        return self.value_scales + _to_line(self.block_size * SCALE_BYTES) + self.padding

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.head_bytes


@dataclass(frozen=True, slots=True)
class CpuKV:
    """One layer's KV memory: bytes [N * block_bytes], and what the kernels know of it."""

    num_blocks: int
    layout: KVLayout
    memory: Tensor
    native: Any

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def kv_heads(self) -> int:
        return self.layout.kv_heads

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.memory.view(self.num_blocks, self.layout.block_bytes),)

    @property
    def keys(self) -> Tensor:
        """[N, K, S / tile, Dp / pack, tile, pack], a view."""
        at = self.layout
        num_tiles = at.block_size // at.tile
        return self._part(at.dtype, 0, (num_tiles, at.packed_dim, at.tile, at.pack))

    @property
    def values(self) -> Tensor:
        """[N, K, S, D], a view."""
        return self._part(self.dtype, self.layout.values, (self.block_size, self.head_dim))

    @property
    def scales(self) -> Tensor:
        """fp32 [N, K, 2, S] of int8 keys and values, a view."""
        at = self.layout
        apart = (at.value_scales - at.key_scales) // SCALE_BYTES
        both = self._part(torch.float32, at.key_scales, (2, apart))
        return both[..., : at.block_size]

    def _part(self, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> Tensor:
        at, size = self.layout, dtype.itemsize
        strides = (prod(shape[i + 1 :]) for i in range(len(shape)))
        return self.memory.view(dtype).as_strided(
            (self.num_blocks, at.kv_heads, *shape),
            (at.block_bytes // size, at.head_bytes // size, *strides),
            start // size,
        )


class KVOps(NativeOps):
    """`allocate_kv`, `allocate_shared_kv`, `export_kv`, `import_kv`, `copy_kv` and `zero_kv`; see
    quire.ops.kv.
    """

    copy_kv, zero_kv = staticmethod(copy_kv.definition), staticmethod(zero_kv.definition)

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
    ) -> CpuKV:
        """Zeros; memory is taken when it is touched, that of the first blocks at once."""
        assert device.type == "cpu"
        at = _layout(KVShape(block_size, kv_heads, head_dim), dtype)
        memory = self._allocate(num_blocks * at.block_bytes)
        return self._kv(num_blocks, at, memory)

    def allocate_shared_kv(
        self,
        num_blocks: int,
        shapes: Sequence[BlockShape],
        dtype: torch.dtype,
        *,
        device: torch.device,
    ) -> tuple[CpuKV | PlainMemory, ...]:
        """Zeros. What a page has more than a block is divided among its heads."""
        assert device.type == "cpu"
        layouts = [_layout(s, dtype) for s in shapes if isinstance(s, KVShape)]
        sizes = [at.block_bytes for at in layouts]
        sizes += [plain_bytes(s, dtype) for s in shapes if not isinstance(s, KVShape)]
        page = page_bytes(sizes, [at.kv_heads * LINE for at in layouts])
        memory = self._allocate(num_blocks * page)

        def view(shape: BlockShape) -> CpuKV | PlainMemory:
            if not isinstance(shape, KVShape):
                return plain_memory(memory.view(num_blocks, page), shape, dtype)
            at = _layout(shape, dtype)
            padding = page // at.kv_heads - at.head_bytes
            return self._kv(num_blocks, replace(at, padding=padding), memory)

        return tuple(map(view, shapes))

    def _allocate(self, num_bytes: int) -> Tensor:
        """Zeros, whose first page a thread takes: the first request would wait for one of each
        layer.
        """
        return huge_tensor((num_bytes,), torch.uint8, touches_start=True)

    def _kv(self, num_blocks: int, at: KVLayout, memory: Tensor) -> CpuKV:
        native = self._native.KVMemory(
            memory.data_ptr(),
            num_blocks,
            at.block_size,
            at.kv_heads,
            at.head_dim,
            at.tile,
            at.head_bytes,
            at.values,
            at.key_scales,
            at.value_scales,
            at.is_int8,
        )
        return CpuKV(num_blocks, at, memory, native)

    def export_kv(self, kv: CpuKV, block_ids: BlockIds) -> Tensor:
        """[n, 2, S, K, D] in the memory's dtype; int8: [n, 2, S, K, D + 4]."""
        ids = ids_on(block_ids, kv.memory.device)
        shape = (len(ids), kv.block_size, kv.kv_heads, -1)
        # [n, K, tiles, d, slot, pack] -> [n, tiles, slot, K, d, pack]
        tiles = kv.keys.index_select(0, ids).permute(0, 2, 4, 1, 3, 5)
        width = kv.layout.packed_dim * kv.layout.pack
        keys = tiles.reshape(*shape[:3], width)[..., : kv.head_dim]
        values = kv.values.index_select(0, ids).transpose(1, 2)
        data = torch.stack((keys, values), 1)
        if not kv.layout.is_int8:
            return data
        return with_scales(data, kv.scales.index_select(0, ids).permute(0, 2, 3, 1))

    def import_kv(self, kv: CpuKV, block_ids: BlockIds, data: Tensor) -> None:
        """Write data [n, 2, S, K, D], or what `export_kv` gave, into the blocks."""
        ids, dim = ids_on(block_ids, kv.memory.device), kv.head_dim
        data = data.to("cpu")
        if kv.layout.is_int8:
            data, scales = numbers_and_scales(data, kv.dtype)
            kv.scales.index_copy_(0, ids, scales.permute(0, 3, 1, 2))
        data = data.to(kv.dtype)
        at = kv.layout
        keys = data.new_zeros(*data[:, 0].shape[:3], at.packed_dim * at.pack)
        keys[..., :dim] = data[:, 0]
        keys = keys.view(
            len(ids), at.block_size // at.tile, at.tile, at.kv_heads, at.packed_dim, at.pack
        )
        kv.keys.index_copy_(0, ids, keys.permute(0, 3, 1, 4, 2, 5))
        kv.values.index_copy_(0, ids, data[:, 1].transpose(1, 2))


def _layout(shape: KVShape, dtype: torch.dtype) -> KVLayout:
    if dtype is FP8:
        raise NotBuiltYet("kv_cache_dtype", "fp8 on CPUs", "Use int8, which is as small.")
    return KVLayout(shape.block_size, shape.kv_heads, shape.head_dim, dtype)
