"""Which layers share a block table: the KV groups of a spec, and what a token costs in memory. Free
of torch.

All groups draw blocks from one pool, so every block must be as big as every other: groups have the
same number of layer slots, and slot s of all groups is one piece of memory. The number is that of
the rarest kind of layer, unless the kinds are so close that padding the smaller is cheaper; a group
with fewer layers than slots leaves the last slots empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quire.errors import LoadError
from quire.models.spec import Decoder

_CLOSE = 1.5  # kinds whose layer counts differ by less than this factor get one group each


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one block table: each keeps all tokens (full) or the last `window` (sliding)."""

    kind: Literal["full", "sliding"]
    window: int | None
    layers: tuple[int, ...]


def kv_groups(decoder: Decoder) -> tuple[KVGroup, ...]:
    """The groups in a fixed order: full attention first, then by window; layers ascending.

    Raises LoadError if layers differ in the shape of a token's keys and values.
    """
    _check_one_shape(decoder)
    by_window: dict[int | None, list[int]] = {}
    for layer, block in enumerate(decoder.blocks):
        by_window.setdefault(block.attn.window, []).append(layer)
    slots = _slots([len(layers) for layers in by_window.values()])
    return tuple(
        KVGroup("full" if window is None else "sliding", window, tuple(layers[i : i + slots]))
        for window, layers in sorted(by_window.items(), key=lambda item: item[0] or 0)
        for i in range(0, len(layers), slots)
    )


def layer_slots(groups: tuple[KVGroup, ...]) -> int:
    """The layers' worth of memory that one block of the pool spans."""
    return max(len(group.layers) for group in groups)


def layer_group(decoder: Decoder) -> tuple[int, ...]:
    """The index of each layer's group."""
    where = {layer: g for g, group in enumerate(kv_groups(decoder)) for layer in group.layers}
    return tuple(where[layer] for layer in range(len(decoder.blocks)))


def kv_bytes_per_token(decoder: Decoder, kv_dtype_bytes: int) -> int:
    """Bytes of keys and values that one token has while every layer sees it."""
    return sum(_values_per_token(decoder)) * kv_dtype_bytes


def _slots(counts: list[int]) -> int:
    fewest, most = min(counts), max(counts)
    return most if most < _CLOSE * fewest else fewest


def _values_per_token(decoder: Decoder) -> Iterator[int]:
    for block in decoder.blocks:
        yield 2 * block.attn.kv_heads * block.attn.head_dim


def _check_one_shape(decoder: Decoder) -> None:
    shapes = {(b.attn.kv_heads, b.attn.head_dim) for b in decoder.blocks}
    if len(shapes) > 1:
        raise LoadError(
            f"The layers have keys and values of different shapes {sorted(shapes)}; one KV pool "
            "cannot hold them yet."
        )
