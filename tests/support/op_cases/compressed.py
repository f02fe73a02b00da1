"""Cases of attention to recent tokens and compressed entries. Every slot that a step may not read
holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.ops.catalog import Ops
from quire.ops.kv import LatentShape, LayerLatents
from quire.ops.mixers.compressed import Compressor
from quire.ops.mixers.indexed import NO_TOKEN
from quire.ops.rotary import RotaryTable
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared, by_row
from tests.support.op_cases.paged import (
    DECODE,
    MIXED,
    PagedRows,
    PagedShape,
    StepPart,
    plan_of,
    tables,
)
from tests.support.op_cases.rows import norm_weight

SCALE, DIM, TURNED, HEADS, INDEX, POSITIONS = 0.4, 8, 4, 3, 6, 40
LONGER = ((1, 3), (1, 21), (2, 33), (1, 1), (4, 12), (1, 32))


@dataclass(frozen=True)
class _Kind:
    """Tokens of an entry, and whether pieces overlap."""

    rate: int
    overlaps: bool

    @property
    def width(self) -> int:
        """Of a token's row: key, numbers and gates of entries, and of their keys."""
        return DIM + 2 * (1 + self.overlaps) * (DIM + INDEX)


APART, OVERLAPPING = _Kind(3, False), _Kind(2, True)


@dataclass(frozen=True)
class _Step:
    """Rows over both memories, which are filled where they may read."""

    rows: PagedRows
    near: np.ndarray
    far: np.ndarray
    recent: LayerLatents
    entries: LayerLatents
    kind: _Kind
    positions: list[int]

    @staticmethod
    def of(ops: Ops, draw: Draw, lengths: Sequence[tuple[int, int]], kind: _Kind) -> _Step:
        rows = PagedRows(tuple(lengths), PagedShape(block_size=4))
        near, pool = tables(rows, draw.rng)
        of_entries = PagedRows(tuple(lengths), PagedShape(block_size=2 * kind.rate))
        far, entry_pool = tables(of_entries, draw.rng)
        recent = ops.allocate_shared_kv(pool, [LatentShape(4, kind.width, 0)], draw.dtype)[0]
        shape = LatentShape(2, DIM, 0, INDEX)
        entries = ops.allocate_shared_kv(entry_pool, [shape], draw.dtype)[0]
        assert isinstance(recent, LayerLatents) and isinstance(entries, LayerLatents)
        for part in (*recent.parts, *entries.parts):
            part.fill_(float("nan"))
        positions = []
        for row, (new, length) in enumerate(rows.lengths):
            _fill(draw, recent, near[row], length)
            _fill(draw, entries, far[row], (length - new) // kind.rate)
            positions += range(length - new, length)
        return _Step(rows, near, far, recent, entries, kind, positions)

    def slots(self) -> list[int]:
        """Of new tokens in the memory of entries."""
        size, found = 2 * self.kind.rate, []
        for row, (new, length) in enumerate(self.rows.lengths):
            for position in range(length - new, length):
                block, offset = divmod(position, size)
                found.append(int(self.far[row, block]) * size + offset)
        return found

    def prepared(
        self, ops: Ops, draw: Draw, arguments: Arguments, per_token: dict[str, int]
    ) -> Prepared:
        """One call for each new token by itself."""
        has_entries = "slots" in arguments

        def call(part: StepPart) -> Arguments:
            first, starts, *_ = part
            axes, count = per_token.items(), int(starts[-1])
            found = arguments | {n: arguments[n].narrow(axis, first, count) for n, axis in axes}
            found["recent"] = self.recent
            found["plan"] = plan_of(ops.plan_indexed, draw, self.near, 4, part)
            if has_entries:
                found["latents"], size = self.entries, 2 * self.kind.rate
                found["entry_plan"] = plan_of(ops.plan_indexed, draw, self.far, size, part)
            return found

        return Prepared(call(self.rows.whole_step()), tuple(map(call, self.rows.each_token())))


def _fill(draw: Draw, latents: LayerLatents, table: np.ndarray, count: int) -> None:
    for part in latents.parts:
        for i in range(count):
            block, offset = divmod(i, part.shape[1])
            part[int(table[block]), offset] = draw.of(draw.rng.standard_normal(part.shape[2]))


def _rotary(draw: Draw) -> RotaryTable:
    angles = draw.rng.uniform(-3, 3, (POSITIONS, TURNED // 2))
    cos_sin = draw.wide(1.2 * np.concatenate((np.cos(angles), np.sin(angles)), 1))
    return RotaryTable(cos_sin, TURNED, interleaved=True)


def _compressor(draw: Draw, kind: _Kind, first: int, width: int) -> Compressor:
    bias = draw.wide(draw.rng.standard_normal((kind.rate, (1 + kind.overlaps) * width)))
    norm = norm_weight(draw, "rms_late_cast", width)
    return Compressor(first, kind.rate, kind.overlaps, bias, norm, _rotary(draw))


def _store(name: str, count: int, padding: int = 0) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        pool = count // 4 + 3
        memory = ops.allocate_shared_kv(pool, [LatentShape(4, DIM + 5, 0)], draw.dtype)[0]
        assert isinstance(memory, LayerLatents)
        memory.data.fill_(float("nan"))
        slots = draw.rng.permutation(pool * 4)[:count]
        slots[count - padding :] = -1
        arguments = {
            "q": draw.strided(count, HEADS, DIM),
            "key": draw.strided(count, DIM),
            "rest": draw.strided(count, 5),
            "latents": memory,
            "slots": draw.integers(slots),
            "positions": draw.integers(draw.rng.integers(0, POSITIONS, (1, count))),
            "rotary": _rotary(draw),
        }
        return by_row("recent_store", arguments)

    return Case("recent_store", name, prepare)


def _select(name: str, lengths: Sequence[tuple[int, int]], kind: _Kind, top_k: int = 3) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        step = _Step.of(ops, draw, lengths, kind)
        count, first = len(step.positions), DIM + 2 * (1 + kind.overlaps) * DIM
        arguments = {
            "q": draw.strided(count, 9, INDEX),
            "weights": draw.strided(count, 9),
            "slots": draw.integers(step.slots()),
            "positions": draw.integers(np.array([step.positions]).reshape(1, count)),
            "by": _compressor(draw, kind, first, INDEX),
            "top_k": top_k,
        }
        per_token = {"q": 0, "weights": 0, "slots": 0, "positions": 1}
        return step.prepared(ops, draw, arguments, per_token)

    return Case("entry_select", f"{name}-{kind.rate}-{top_k}", prepare)


def _attend(
    name: str,
    lengths: Sequence[tuple[int, int]],
    kind: _Kind | None,
    window: int = 3,
    top_k: int | None = None,
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        step = _Step.of(ops, draw, lengths, kind or APART)
        count = len(step.positions)
        arguments: Arguments = {
            "q": draw.strided(count, HEADS, DIM),
            "sinks": draw.wide(draw.rng.standard_normal(HEADS)),
            "positions": draw.integers(np.array([step.positions]).reshape(1, count)),
            "rotary": _rotary(draw),
            "window": window,
            "scale": SCALE,
            "latents": None,
        }
        per_token = {"q": 0, "positions": 1}
        if kind is not None:
            arguments["slots"] = draw.integers(step.slots())
            arguments["by"] = _compressor(draw, kind, DIM, DIM)
            per_token["slots"] = 0
        if kind is not None and top_k is not None:
            rows = []
            for position in step.positions:
                some = np.sort(draw.rng.permutation((position + 1) // kind.rate)[:top_k])
                rows.append([*some, *[NO_TOKEN] * (top_k - len(some))])
            arguments["chosen"] = draw.integers(np.array(rows).reshape(count, top_k))
            per_token["chosen"] = 0
        return step.prepared(ops, draw, arguments, per_token)

    facts = "" if kind is None else f"-{kind.rate}" + (f"-{top_k}" if top_k else "")
    return Case("recent_attend", f"{name}-{window}{facts}", prepare)


_STEPS = (("no_tokens", ()), ("decode", DECODE), ("mixed", MIXED), ("longer", LONGER))

CASES = (
    *(_store(str(count), count) for count in (0, 1, 7)),
    _store("padding", 6, padding=2),
    *(_select(name, lengths, OVERLAPPING) for name, lengths in _STEPS),
    _select("mixed", MIXED, APART, 2),
    *(_attend(name, lengths, OVERLAPPING, top_k=2) for name, lengths in _STEPS),
    _attend("mixed", MIXED, APART),
    _attend("decode", DECODE, APART, 9),
    _attend("mixed", MIXED, None),
)
