"""Cases of attention over chosen latents, and over chosen blocks of keys. Every slot that a step
may not read holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.ops.catalog import Ops
from quire.ops.kv import KVShape, LatentShape, LayerLatents, StateShape
from quire.ops.mixers.indexed import NO_TOKEN
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared
from tests.support.op_cases.paged import (
    DECODE,
    MIXED,
    RAGGED,
    PagedRows,
    PagedShape,
    StepPart,
    plan_of,
    tables,
)

SCALE = 0.4


@dataclass(frozen=True)
class Sizes:
    """Heads H, latent r, rotated key R, block size S; heads n and numbers I of the indexer."""

    heads: int = 4
    rank: int = 8
    rotated: int = 4
    block_size: int = 4
    index_heads: int = 7
    index_dim: int = 6


ODD = Sizes(5, 19, 6, 3, 9, 11)


@dataclass(frozen=True)
class _Step:
    """Rows over memory that is filled where they may read."""

    rows: PagedRows
    table: np.ndarray
    latents: LayerLatents

    @staticmethod
    def of(
        ops: Ops, draw: Draw, lengths: Sequence[tuple[int, int]], s: Sizes, is_shared: bool
    ) -> _Step:
        rows = PagedRows(tuple(lengths), PagedShape(block_size=s.block_size))
        table, pool = tables(rows, draw.rng)
        shape = LatentShape(s.block_size, s.rank, s.rotated, s.index_dim)
        others = [KVShape(s.block_size, 2, s.rank + s.rotated), StateShape(100)] * is_shared
        latents = ops.allocate_shared_kv(pool, [shape, *others], draw.dtype)[0]
        assert isinstance(latents, LayerLatents) and latents.keys is not None
        for part in latents.parts:
            part.fill_(float("nan"))
            for row, (_, length) in enumerate(rows.lengths):
                for first in range(0, length, s.block_size):
                    count = min(s.block_size, length - first)
                    values = draw.of(draw.rng.standard_normal((count, part.shape[2])))
                    part[int(table[row, first // s.block_size]), :count] = values
        return _Step(rows, table, latents)

    def taken(self, part: torch.Tensor, padding: int = 0) -> tuple[list[int], np.ndarray]:
        """Take what new tokens have in a part of the memory out of it, but for the last `padding`
        ones: their slots, and rows that are to be stored. Those of padding have others, and no
        slot.
        """
        count, slots, found, size = int(self.rows.query_start[-1]), [], [], part.shape[1]
        for row, (new, length) in enumerate(self.rows.lengths):
            for position in range(length - new, length):
                block, offset = divmod(position, size)
                slots.append(int(self.table[row, block]) * size + offset)
                place = part[int(self.table[row, block]), offset]
                found.append(place.cpu().double().clone().numpy())
                if len(slots) <= count - padding:
                    place.fill_(float("nan"))
        for token in range(count - padding, count):
            slots[token], found[token] = -1, -found[token]
        return slots, np.array(found).reshape(count, part.shape[2])

    def prepared(
        self, ops: Ops, draw: Draw, arguments: Arguments, per_token: Sequence[str]
    ) -> Prepared:
        """One call for each new token by itself."""

        def call(part: StepPart) -> Arguments:
            first, starts, *_ = part
            plan = plan_of(ops.plan_indexed, draw, self.table, self.latents.block_size, part)
            own = {name: arguments[name][first : first + int(starts[-1])] for name in per_token}
            return {**arguments, **own, "latents": self.latents, "plan": plan}

        return Prepared(call(self.rows.whole_step()), tuple(map(call, self.rows.each_token())))


def _select(
    name: str,
    lengths: Sequence[tuple[int, int]],
    top_k: int = 5,
    s: Sizes = Sizes(),  # noqa: B008  (frozen)
    *,
    is_shared: bool = False,
    padding: int = 0,
) -> Case:
    """The keys of new tokens are stored, but those of the last `padding` ones, whose slots have
    others.
    """

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        step = _Step.of(ops, draw, lengths, s, is_shared)
        assert step.latents.keys is not None
        slots, keys = step.taken(step.latents.keys, padding)
        count = len(slots)
        arguments = {
            "q": draw.strided(count, s.index_heads, s.index_dim),
            "k": draw.of(keys),
            "weights": draw.strided(count, s.index_heads),
            "slots": draw.integers(slots),
            "top_k": top_k,
        }
        return step.prepared(ops, draw, arguments, ("q", "k", "weights", "slots"))

    return Case("index_select", f"{name}-{top_k}", prepare)


def _attend(
    name: str,
    lengths: Sequence[tuple[int, int]],
    top_k: int = 5,
    s: Sizes = Sizes(),  # noqa: B008  (frozen)
    *,
    is_shared: bool = False,
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        step = _Step.of(ops, draw, lengths, s, is_shared)
        chosen = []
        for new, length in step.rows.lengths:
            for seen in range(length - new + 1, length + 1):
                some = np.sort(draw.rng.permutation(seen)[:top_k])
                chosen.append([*some, *[NO_TOKEN] * (top_k - len(some))])
        count = len(chosen)
        arguments = {
            "q": draw.strided(count, s.heads, s.rank),
            "q_rotated": draw.strided(count, s.heads, s.rotated),
            "chosen": draw.integers(np.array(chosen).reshape(count, top_k)),
            "scale": SCALE,
        }
        return step.prepared(ops, draw, arguments, ("q", "q_rotated", "chosen"))

    return Case("indexed_attend", f"{name}-{top_k}", prepare)


def _select_blocks(
    name: str,
    lengths: Sequence[tuple[int, int]],
    top_k: int = 2,
    local: int = 1,
    *,
    size: int = 3,
    s: Sizes = Sizes(),  # noqa: B008  (frozen)
    is_shared: bool = False,
    padding: int = 0,
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        step = _Step.of(ops, draw, lengths, s, is_shared)
        assert step.latents.keys is not None
        slots, keys = step.taken(step.latents.keys, padding)
        arguments = {
            "q": draw.strided(len(slots), 3, s.index_dim),
            "k": draw.of(keys),
            "slots": draw.integers(slots),
            "size": size,
            "top_k": top_k,
            "local": local,
        }
        return step.prepared(ops, draw, arguments, ("q", "k", "slots"))

    return Case("block_select", f"{name}-{top_k}of{size}-{local}", prepare)


def _attend_blocks(
    name: str,
    lengths: Sequence[tuple[int, int]],
    top_k: int = 2,
    *,
    size: int = 3,
    heads: int = 6,
    kv_heads: int = 3,
    groups: int = 3,
    dim: int = 5,
    is_shared: bool = False,
    padding: int = 0,
) -> Case:
    """Each choice has the last block."""
    s = Sizes(rank=2 * kv_heads * dim, rotated=0, block_size=4)

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        step = _Step.of(ops, draw, lengths, s, is_shared)
        slots, rows = step.taken(step.latents.data, padding)
        count, chosen = len(slots), []
        for new, length in step.rows.lengths:
            for seen in range(length - new + 1, length + 1):
                last = (seen - 1) // size
                for _ in range(groups):
                    some = [*np.sort(draw.rng.permutation(last)[: top_k - 1]), last]
                    chosen.append([*some, *[NO_TOKEN] * (top_k - len(some))])
        keys, values = rows.reshape(count, 2, kv_heads, dim).transpose(1, 0, 2, 3)
        arguments = {
            "q": draw.strided(count, heads, dim),
            "k": draw.of(keys),
            "v": draw.of(values),
            "chosen": draw.integers(np.array(chosen).reshape(count, groups, top_k)),
            "slots": draw.integers(slots),
            "scale": SCALE,
            "size": size,
        }
        return step.prepared(ops, draw, arguments, ("q", "k", "v", "chosen", "slots"))

    return Case("block_attend", f"{name}-{top_k}of{size}-{heads}x{kv_heads}x{groups}", prepare)


CASES = (
    *(
        make(name, lengths)
        for make in (_select, _attend, _select_blocks, _attend_blocks)
        for name, lengths in (
            ("no_tokens", ()),
            ("decode", DECODE),
            ("mixed", MIXED),
            ("ragged", RAGGED),
        )
    ),
    _select("all", MIXED, 100),
    _attend("all", MIXED, 100),
    _select("odd-shared", MIXED, 3, ODD, is_shared=True),
    _attend("odd-shared", MIXED, 3, ODD, is_shared=True),
    _select("padding", DECODE, padding=1),
    _select_blocks("all", MIXED, 100, 0),
    _select_blocks("local", MIXED, 3, 3, size=2),
    _select_blocks("odd-shared", MIXED, 3, 0, size=2, s=ODD, is_shared=True),
    _select_blocks("padding", DECODE, padding=1),
    _attend_blocks("all", MIXED, 100),
    _attend_blocks(
        "groups-shared", MIXED, 3, size=2, heads=8, kv_heads=2, groups=4, is_shared=True
    ),
    _attend_blocks("keys", RAGGED, 3, heads=8, kv_heads=4, groups=2),
    _attend_blocks("padding", DECODE, padding=1),
)
