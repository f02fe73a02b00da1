"""The KV memory of all layers.

The layers of a group sit in slots 0, 1, ...; slot s of all groups is one `LayerKV`, since a block
belongs to one group at a time. So the pool needs as many `LayerKV`s as the largest group has
layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops import LayerKV, Ops


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
        num_slots = max(len(layers) for layers in group_layers)
        self._ops = ops
        self._slots: list[LayerKV] = [
            ops.allocate_kv(num_blocks, block_size, kv_heads, head_dim, dtype)
            for _ in range(num_slots)
        ]
        slot_of = {layer: s for layers in group_layers for s, layer in enumerate(layers)}
        self.layers = [self._slots[slot_of[layer]] for layer in sorted(slot_of)]

    @property
    def nbytes(self) -> int:
        """What all blocks take in memory."""
        return sum(slot.nbytes for slot in self._slots)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer."""
        sources, targets = zip(*copies, strict=True)
        for slot in self._slots:
            self._ops.copy_kv(slot, sources, targets)

    def zero(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros in every layer."""
        for slot in self._slots:
            self._ops.zero_kv(slot, blocks)
