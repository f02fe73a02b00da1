"""The memory of all layers of a pool.

Slot s of all KV groups shares one piece of memory, because a block belongs to one group at a time.
If the layers of a slot have blocks of one shape they use it as one `LayerKV`; otherwise each shape
has a view of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.models.kv_pool import KVPool
from quire.models.layer_memory import KeyValues, Latents, LayerMemory, NumberBytes
from quire.ops import Ops
from quire.ops.kv import BlockMemory, BlockShape, KVShape, LatentShape, StateShape
from quire.runner.devices.device import Array
from quire.runner.pages_ahead import PagesAhead

_ALIGNMENT = 64
"""Bytes to a multiple of which each part of a block's content begins."""


@dataclass(frozen=True, slots=True)
class BlockPlaces:
    """The parts of a block of a KV group, in the order of `KVCache.read_block`: addresses, bytes
    to the same part of the next block, and bytes.
    """

    starts: list[int]
    strides: list[int]
    sizes: list[int]


class KVCache:
    """Blocks for every layer of `pool`, or for some; `layers[i]` is the memory of layer i, None if
    it keeps nothing here.
    """

    def __init__(
        self,
        *,
        ops: Ops,
        pool: KVPool,
        num_blocks: int,
        dtype: torch.dtype,
        send: Callable[[Array], Tensor] = torch.from_numpy,
        places: Collection[int] | None = None,
    ) -> None:
        """`dtype`: that of keys and values. `send`: `Device.send` of the device that has them.
        `places`: the layers of the pool that have their memory here; None: all.
        """
        own = range(len(pool.memories)) if places is None else places
        self._ops = ops
        self._dtype = dtype
        self._send = send
        self.pool = pool
        self.num_blocks = num_blocks
        slots = [[(group, layer) for group, layer in slot if layer in own] for slot in pool.slots]
        self._slots = [_layers_by_shape(pool, slot) for slot in slots if slot]
        self._views: list[BlockMemory] = []
        self._parts: dict[int, list[Tensor]] = {}
        self._places_of: dict[int, BlockPlaces] = {}
        self.layers: list[BlockMemory | None] = []
        self.restore()

    def release(self) -> None:
        """Release the memory and its contents; `layers` is empty until `restore`."""
        self.pages = PagesAhead(())
        self._views = []
        self._parts, self._places_of = {}, {}
        self.layers.clear()

    def restore(self) -> None:
        """Allocate empty memory again. `layers` stays the same list object."""
        self.layers[:] = [None] * len(self.pool.memories)
        for slot in self._slots:
            for view, layers in zip(self._allocate(list(slot)), slot.values(), strict=True):
                self._views.append(view)
                for layer in layers:
                    self.layers[layer] = view
        self.pages = PagesAhead([part for view in self._views for part in view.parts])

    def resize(self, num_blocks: int) -> None:
        """Replace the memory by that of `num_blocks` blocks; all contents are lost."""
        self.release()
        self.num_blocks = num_blocks
        self.restore()

    @property
    def nbytes(self) -> int:
        parts = (part.untyped_storage() for view in self._views for part in view.parts)
        # views of one slot share their memory, which counts once
        return sum({storage.data_ptr(): storage.nbytes() for storage in parts}.values())

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer, one after the other."""
        for sources, targets in _independent(copies):
            source_ids, target_ids = self._ids(sources), self._ids(targets)
            for view in self._views:
                self._ops.copy_kv(view, source_ids, target_ids)

    def zero(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros in every layer."""
        ids = self._ids(blocks)
        for view in self._views:
            self._ops.zero_kv(view, ids)

    def content_bytes(self, group: int) -> int:
        """The bytes of a block of a KV group, as `read_block` lays them out."""
        return sum(_aligned(part[0].nbytes) for part in self._parts_of(group))

    def places_of(self, group: int, block: int) -> BlockPlaces | None:
        """Addresses of a block's parts in this process's memory; None where a part is not in one
        piece, or is a device's. Valid until the memory is released.
        """
        first = self._places_of.get(group)
        if first is None:
            parts = self._parts_of(group)
            if any(part.device.type != "cpu" or not part[0].is_contiguous() for part in parts):
                return None
            first = BlockPlaces(
                [part.data_ptr() for part in parts],
                [part.stride(0) * part.element_size() for part in parts],
                [part[0].nbytes for part in parts],
            )
            self._places_of[group] = first
        starts = [
            start + block * stride
            for start, stride in zip(first.starts, first.strides, strict=True)
        ]
        return BlockPlaces(starts, first.strides, first.sizes)

    def read_block(self, group: int, block: int, into: Tensor) -> None:
        """Copy what a block of a KV group holds, in all its layers, as it is: into the first bytes
        of `into` [B] uint8, on any device. Another memory of the same provider, with the same pool,
        can write it.
        """
        start = 0
        for part, place in zip(self._parts_of(group), self._places(group, into), strict=True):
            place.copy_(part[block])
            end = start + part[0].nbytes
            start += _aligned(part[0].nbytes)
            into[end:start].zero_()  # what the buffer had before goes nowhere

    def write_block(self, group: int, block: int, content: Tensor) -> None:
        """Write what `read_block` has copied into a block."""
        for part, place in zip(self._parts_of(group), self._places(group, content), strict=True):
            part[block].copy_(place)

    def _parts_of(self, group: int) -> list[Tensor]:
        """Views [N, ...] of all that blocks of this group hold."""
        found = self._parts.get(group)
        if found is None:
            views = (self.layers[layer] for layer in self.pool.groups[group].layers)
            found = [part for view in views if view is not None for part in view.parts]
            self._parts[group] = found
        return found

    def _places(self, group: int, content: Tensor) -> Iterator[Tensor]:
        """The places of a block's parts in its content."""
        start = 0
        for part in self._parts_of(group):
            one = part[0]
            yield content[start : start + one.nbytes].view(one.dtype).view(one.shape)
            start += _aligned(one.nbytes)

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        """Sent once for all layers, from memory for which the host does not wait."""
        return self._send(np.array(blocks, dtype=np.int64))

    def _allocate(self, shapes: list[BlockShape]) -> Sequence[BlockMemory]:
        """Allocate a slot's memory, as blocks of each of these shapes."""
        first = shapes[0]
        if len(shapes) > 1 or not isinstance(first, KVShape):
            return self._ops.allocate_shared_kv(self.num_blocks, shapes, self._dtype)
        return [
            self._ops.allocate_kv(
                self.num_blocks, first.block_size, first.kv_heads, first.head_dim, self._dtype
            )
        ]


def _aligned(num_bytes: int) -> int:
    """The next place at which numbers of any type may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _independent(copies: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield, in order, sources and targets of copies that can be made at once: no copy reads or
    writes what another one writes.
    """
    sources: list[int] = []
    targets: list[int] = []
    for source, target in copies:
        # the scheduler may reuse a block that an earlier copy of the same plan has freed
        if source in targets or target in targets or target in sources:
            yield sources, targets
            sources, targets = [], []
        sources.append(source)
        targets.append(target)
    if sources:
        yield sources, targets


def _layers_by_shape(pool: KVPool, slot: Sequence[tuple[int, int]]) -> dict[BlockShape, list[int]]:
    """The layers of a slot, given as (group, layer), by the shape of their blocks."""
    by_shape: dict[BlockShape, list[int]] = {}
    for group, layer in slot:
        memory = pool.memories[layer]
        assert memory is not None, "a layer that keeps nothing has a slot"
        shape = _block_shape(memory, pool.groups[group].block_size, pool.number)
        by_shape.setdefault(shape, []).append(layer)
    return by_shape


def _block_shape(memory: LayerMemory, block_size: int, number: NumberBytes) -> BlockShape:
    if isinstance(memory, KeyValues):
        return KVShape(block_size, memory.kv_heads, memory.head_dim)
    if isinstance(memory, Latents):
        rows = block_size // memory.every
        return LatentShape(rows, memory.rank, memory.rotated, memory.index_dim or 0)
    return StateShape(memory.block_bytes(block_size, number))
