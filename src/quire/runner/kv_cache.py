"""The KV memory of all layers.

The layers of a group sit in slots 0, 1, ...; slot s of all groups is one `LayerKV`, since a block
belongs to one group at a time. So the pool needs as many `LayerKV`s as the largest group has
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from quire.ops import LayerKV, Ops
from quire.scheduling.step import NULL_BLOCK


class KVCache:
    """Blocks of `block_size` tokens for every layer; `layers[i]` is where layer i keeps its K/V."""

    def __init__(
        self,
        *,
        ops: Ops,
        group_layers: Sequence[Sequence[int]],
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._ops = ops
        self.num_blocks = num_blocks
        shape = {"block_size": block_size, "kv_heads": kv_heads, "head_dim": head_dim}
        self._allocate = partial(ops.allocate_kv, **shape, dtype=dtype)
        self._num_slots = max(len(layers) for layers in group_layers)
        slot_of = {layer: s for layers in group_layers for s, layer in enumerate(layers)}
        self._slot_of_layer = [slot_of[layer] for layer in sorted(slot_of)]
        self._slots: list[LayerKV] = []
        self.layers: list[LayerKV] = []
        self.restore()

    def release(self) -> None:
        """Give the memory back, and with it all K/V; `layers` is empty until `restore`."""
        self._slots = []
        self.layers.clear()

    def restore(self) -> None:
        """Take memory again, with nothing in it. `layers` stays the list that it is."""
        self._slots = [self._allocate(num_blocks=self.num_blocks) for _ in range(self._num_slots)]
        self.layers[:] = [self._slots[slot] for slot in self._slot_of_layer]
        self.zero([NULL_BLOCK])  # padding reads it, and must not find NaN

    def resize(self, num_blocks: int) -> None:
        """Take memory for so many blocks instead; all K/V is lost."""
        self.release()
        self.num_blocks = num_blocks
        self.restore()

    @property
    def nbytes(self) -> int:
        """What all blocks take in memory."""
        parts = (part.untyped_storage() for slot in self._slots for part in slot.parts)
        return sum({storage.data_ptr(): storage.nbytes() for storage in parts}.values())

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer."""
        sources, targets = zip(*copies, strict=True)
        for slot in self._slots:
            self._ops.copy_kv(slot, sources, targets)

    def zero(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros in every layer."""
        for slot in self._slots:
            self._ops.zero_kv(slot, blocks)
