"""The pool whose blocks the layers of one or more models share: their KV groups, the parts of a
block, and the number of blocks that a request needs. Free of torch.

Layers that keep the same tokens have one block table; they are a KV group, latents apart from keys
and values. All groups draw blocks from one pool, so every block must be as big as every other:
groups have the same number of layer slots, and slot s of all groups is one piece of memory, a page
for each block. The number of slots is that of the rarest kind of layer, unless the kinds are so
close that padding the smaller is cheaper; a group with fewer layers than slots leaves the last
slots empty. Where the layers of a group are smaller than those of another, its blocks have as many
times more tokens as fit into a page. What is left over is unused, and `KVPool.unused` says how much
that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quire.errors import InvalidParameter
from quire.models.foreign.spec import ForeignDecoder
from quire.models.layer_memory import (
    KeyValues,
    Latents,
    LayerMemory,
    MemoryKind,
    NumberBytes,
    RecurrentState,
    TokenMemory,
)
from quire.models.spec import Decoder
from quire.scheduling.block_groups import block_group
from quire.scheduling.settings import KVGroupSpec

_CLOSE = 1.5  # kinds whose layer counts differ by less than this factor get one group each
_MOST_LARGER = 8
"""Factor by which a block may exceed `block_size` to fill its page: a prefix hit is a
multiple of it."""
SNAPSHOT_SHARE = 0.25
"""Share of the blocks that snapshots of recurrent states may take."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one block table, in the order of their slots. `layers` counts those of all models
    of the pool. `chunk`: queries see the tokens of their own chunk of so many positions.
    `has_latents`: instead of keys and values; `is_indexed`: queries attend to chosen ones of them.
    `source`: a block table is for a second content of at most so many rows, not for tokens.
    `ignores_spans`: see `Attention`.

    Blocks have `block_size` tokens; one of kind `state` holds the state of a request. The layers of
    a group of kind `none` have no slots.
    """

    kind: MemoryKind
    window: int | None
    layers: tuple[int, ...]
    block_size: int
    chunk: int | None = None
    has_latents: bool = False
    is_indexed: bool = False
    source: int | None = None
    ignores_spans: bool = False

    @property
    def spec(self) -> KVGroupSpec:
        """The group in the scheduler's form."""
        return KVGroupSpec(self.kind, self.window, self.block_size)


@dataclass(frozen=True, slots=True)
class KVPool:
    """The groups of a pool in a fixed order: full attention first, then by window, then second
    contents, then states.

    `memories[i]` is what layer i remembers. Block sizes of groups are multiples of `block_size`.
    `num_drafts`: the most drafts of a request in a step.
    """

    memories: tuple[LayerMemory | None, ...]
    groups: tuple[KVGroup, ...]
    block_size: int
    number: NumberBytes
    num_drafts: int = 0

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The index of each layer's group."""
        where = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        return tuple(where[layer] for layer in range(len(self.memories)))

    @property
    def slots(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The layers that have their memory in each slot, each as (group, layer)."""
        groups = [(g, group) for g, group in enumerate(self.groups) if group.kind != "none"]
        count = max((len(group.layers) for _, group in groups), default=0)
        return tuple(
            tuple((g, group.layers[s]) for g, group in groups if s < len(group.layers))
            for s in range(count)
        )

    @property
    def block_bytes(self) -> int:
        return sum(
            max(self._layer_bytes(self.groups[g], layer) for g, layer in slot)
            for slot in self.slots
        )

    @property
    def block_sizes(self) -> list[int]:
        """Numbers of tokens of blocks, ascending."""
        return sorted({group.block_size for group in self.groups})

    def unused(self, group: KVGroup) -> float:
        """The share of its blocks that this group leaves empty."""
        used = sum(self._layer_bytes(group, layer) for layer in group.layers)
        return 1 - used / self.block_bytes

    def held_blocks(self, length: int, chunk: int) -> int:
        """The most blocks of a request of `length` tokens, with steps of up to `chunk` of them."""
        chunk = max(chunk, 1 + 2 * self.num_drafts)
        sources = sum(-(-(group.source or 0) // group.block_size) for group in self.groups)
        return sources + sum(
            block_group(group.spec, self.block_size, self.num_drafts).num_needed(length, chunk)
            for group in self.groups
        )

    def least_blocks(self, length: int, *, is_chunked: bool) -> int:
        """The fewest blocks with which a request of `length` tokens can run. With `is_chunked`, a
        step may compute as little as one token of a prompt.
        """
        return self.held_blocks(length, 1 if is_chunked else length)

    def enough(self, num_seqs: int, length: int, step: int) -> int:
        """Blocks that always suffice for `num_seqs` requests of `length` tokens, including the null
        block, and where there are recurrent states for as many snapshots as there may be; steps
        have up to `step` tokens.
        """
        blocks = 1 + num_seqs * self.held_blocks(length, min(step, length))
        has_states = any(group.kind == "state" for group in self.groups)
        return math.ceil(blocks / (1 - SNAPSHOT_SHARE)) if has_states else blocks

    def longest(self, num_blocks: int, limit: int, *, is_chunked: bool) -> int:
        """The longest request, at most `limit`, that `num_blocks` can run; 0 if there is none."""
        usable = num_blocks - 1  # the null block is never allocated
        low, high = 0, limit
        # a longer request never needs fewer blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self.least_blocks(middle, is_chunked=is_chunked) <= usable:
                low = middle
            else:
                high = middle - 1
        return low

    def describe(self) -> str:
        """The groups in a few words, such as `28 layers full`."""
        return ", ".join(map(self._words, self.groups))

    def _words(self, group: KVGroup) -> str:
        kind = "chunk" if group.chunk else group.kind if group.window is None else "window"
        text = f"{len(group.layers)} layers {kind}"
        if group.source is not None:
            text += f" of {group.source} rows"
        if group.window is not None:
            text += f" {group.window}"
        if group.kind == "none":
            return f"{len(group.layers)} layers that keep nothing"
        if group.kind != "state" and group.block_size != self.block_size:
            text += f" in blocks of {group.block_size} tokens"
        if group.kind == "state":
            held = sum(self._layer_bytes(group, layer) for layer in group.layers)
            text += f" of {held / 2**20:.2f} MiB a request"
        unused = self.unused(group)
        return text if unused < 0.001 else f"{text} ({unused:.1%} of a block unused)"

    def _layer_bytes(self, group: KVGroup, layer: int) -> int:
        memory = self.memories[layer]
        return 0 if memory is None else memory.block_bytes(group.block_size, self.number)


def memories_of(
    decoders: Iterable[Decoder | ForeignDecoder],
) -> tuple[LayerMemory | None, ...]:
    """The memories of the layers of these models in order. A layer without a mixer has none."""
    return tuple(memory for decoder in decoders for memory in decoder.memories)


def plan_kv_pool(
    memories: Sequence[LayerMemory | None],
    block_size: int,
    number: NumberBytes,
    num_drafts: int = 0,
) -> KVPool:
    """The pool for these layers, with blocks of `block_size` tokens or multiples of it, where steps
    verify up to `num_drafts` drafts of a request. Raises InvalidParameter where chunks of attention
    are not whole blocks.
    """
    groups = list(_groups(memories, block_size))
    groups = _with_full_pages(groups, memories, number)
    for group in groups:
        if group.chunk is not None and group.chunk % group.block_size:
            why = f"layers see chunks of {group.chunk} tokens, which are not whole blocks"
            hint = f"Give a divisor of {group.chunk}."
            raise InvalidParameter("block_size", group.block_size, why, hint)
    return KVPool(tuple(memories), tuple(groups), block_size, number, num_drafts)


def suited_block_size(
    memories: Sequence[LayerMemory | None], block_size: int, number: NumberBytes
) -> int:
    """`block_size`, or the largest of its parts with which chunks of attention are whole blocks."""
    chunks = [m.window for m in memories if isinstance(m, KeyValues) and m.is_chunked]
    size = math.gcd(block_size, *(chunk for chunk in chunks if chunk is not None))
    while size > 1:
        groups = _with_full_pages(list(_groups(memories, size)), memories, number)
        if not any(group.chunk is not None and group.chunk % group.block_size for group in groups):
            break
        size //= 2
    return size


def token_bytes(memories: Iterable[LayerMemory | None], number: NumberBytes) -> int:
    """Bytes of keys and values that one token has while every layer sees it."""
    kept = (m for m in memories if isinstance(m, TokenMemory) and m.kind != "source")
    return sum(m.token_bytes(number) for m in kept)


def state_bytes(memories: Iterable[LayerMemory | None], number: NumberBytes) -> int:
    """Bytes of a request's recurrent state, once."""
    return sum(m.block_bytes(1, number) for m in memories if isinstance(m, RecurrentState))


_Key = tuple[MemoryKind, int | None, int | None, bool, bool, int | None, bool]
_ORDER = ("full", "sliding", "source", "state", "none")


def _groups(memories: Sequence[LayerMemory | None], block_size: int) -> Iterable[KVGroup]:
    by_kind: dict[_Key, list[int]] = {}
    for layer, memory in enumerate(memories):
        by_kind.setdefault(_key(memory), []).append(layer)
    slots = _num_slots([len(layers) for (kind, *_), layers in by_kind.items() if kind != "none"])
    for key in sorted(by_kind, key=_place):
        kind, layers = key[0], by_kind[key]
        # the largest first, where they meet the largest of other groups
        layers.sort(key=lambda layer: -_numbers(memories[layer]))
        size = len(layers) if kind == "none" else slots
        for i in range(0, len(layers), size):
            members = tuple(layers[i : i + size])
            yield KVGroup(kind, key[1], members, block_size, *key[2:])


def _key(memory: LayerMemory | None) -> _Key:
    """Common facts of a group's layers: kind, window, chunk, whether they keep latents, whether
    queries attend to chosen ones, the length of a second content, and whether they ignore spans.
    """
    if memory is None:
        return "none", None, None, False, False, None, False
    is_chunked = isinstance(memory, KeyValues) and memory.is_chunked
    chunk = memory.window if is_chunked else None
    has_latents = isinstance(memory, Latents)
    is_indexed = isinstance(memory, Latents) and memory.is_indexed
    source = memory.source if isinstance(memory, KeyValues) else None
    ignores_spans = isinstance(memory, KeyValues) and memory.ignores_spans
    return memory.kind, memory.window, chunk, has_latents, is_indexed, source, ignores_spans


def _place(key: _Key) -> tuple[int, int, int, bool, bool, int, bool]:
    """The order of groups."""
    kind, window, chunk, has_latents, is_indexed, source, ignores_spans = key
    numbers = (window or 0, chunk or 0)
    return _ORDER.index(kind), *numbers, has_latents, is_indexed, source or 0, ignores_spans


def _num_slots(counts: list[int]) -> int:
    fewest, most = min(counts, default=0), max(counts, default=0)
    return most if most < _CLOSE * fewest else fewest


def _with_full_pages(
    groups: list[KVGroup], memories: Sequence[LayerMemory | None], number: NumberBytes
) -> list[KVGroup]:
    """The groups with block sizes that fill the pages of slot 0: every group's largest layer."""
    firsts = [memories[group.layers[0]] for group in groups]
    largest = max((m.numbers_per_token for m in firsts if isinstance(m, TokenMemory)), default=0)
    grown = []
    for group, first in zip(groups, firsts, strict=True):
        if isinstance(first, TokenMemory):
            times = min(largest // first.numbers_per_token, _MOST_LARGER)
            group = replace(group, block_size=group.block_size * times)
        grown.append(group)
    grown = [_with_whole_rows(group, memories) for group in grown]
    sizes = [
        0 if first is None else first.block_bytes(group.block_size, number)
        for group, first in zip(grown, firsts, strict=True)
    ]
    tokens = max((s for s, g in zip(sizes, grown, strict=True) if g.kind != "state"), default=0)
    times = -(-max(sizes) // tokens) if tokens else 1  # the pages must hold the states
    return [
        replace(group, block_size=group.block_size * times) if group.kind != "state" else group
        for group in grown
    ]


def _with_whole_rows(group: KVGroup, memories: Sequence[LayerMemory | None]) -> KVGroup:
    """The group with blocks that hold whole latents of several tokens."""
    own = (memories[layer] for layer in group.layers)
    rates = [memory.every for memory in own if isinstance(memory, Latents)]
    return replace(group, block_size=math.lcm(group.block_size, *rates))


def _numbers(memory: LayerMemory | None) -> int:
    if memory is None:
        return 0
    if isinstance(memory, TokenMemory):
        return memory.numbers_per_token
    return memory.numbers + memory.wide_numbers
