"""Cases of the ops of latent attention. Every slot that a step may not read holds NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.ops.catalog import Ops
from quire.ops.kv import KVShape, LatentShape, LayerLatents, StateShape
from quire.ops.rotary import RotaryTable
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared, by_row
from tests.support.op_cases.paged import (
    DECODE,
    LONG,
    MIXED,
    RAGGED,
    SPARE_BLOCKS,
    PagedRows,
    PagedShape,
    StepPart,
    plan_of,
    tables,
)
from tests.support.op_cases.rows import norm_weight

SCALE = 0.4


@dataclass(frozen=True)
class Sizes:
    """Heads H, latent r, rotated key R, block size S."""

    heads: int = 4
    rank: int = 8
    rotated: int = 4
    block_size: int = 4


def _heads(
    tokens: int, heads: int, width: int, out: int, *, is_strided: bool = False, bench: str = ""
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        make = draw.strided if is_strided else draw.normal
        x = make(tokens, heads, width)
        w = ops.pack_heads(draw.normal(heads, out, width, scale=width**-0.5))
        arguments = {"x": x, "w": w}
        return Prepared(arguments) if bench else by_row("heads_linear", arguments)

    name = f"{tokens}x{heads}x{width}x{out}{'-strided' * is_strided}"
    return Case("heads_linear", bench or name, prepare, is_bench=bool(bench))


def _memory(ops: Ops, num_blocks: int, s: Sizes, draw: Draw, is_shared: bool) -> LayerLatents:
    """Latents that are NaN, in memory of their own or shared with larger blocks."""
    shape = LatentShape(s.block_size, s.rank, s.rotated)
    others = [KVShape(s.block_size, 2, s.rank + s.rotated), StateShape(100)] if is_shared else []
    latents = ops.allocate_shared_kv(num_blocks, [shape, *others], draw.dtype)[0]
    latents.data.fill_(float("nan"))
    assert isinstance(latents, LayerLatents)
    return latents


def _store(
    name: str,
    num_tokens: int,
    s: Sizes = Sizes(),  # noqa: B008  (frozen)
    *,
    interleaved: bool = False,
    has_rotary: bool = True,
    padding: int = 0,
    is_strided: bool = False,
    is_shared: bool = False,
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        pool, max_positions = num_tokens // s.block_size + SPARE_BLOCKS, 50
        slots = draw.rng.permutation(pool * s.block_size)[:num_tokens]
        slots[num_tokens - padding :] = -1
        make = draw.strided if is_strided else draw.normal
        arguments: Arguments = {
            "q": make(num_tokens, s.heads, s.rotated),
            "x": make(num_tokens, s.rank + s.rotated),
            "latents": _memory(ops, pool, s, draw, is_shared),
            "slots": draw.integers(slots),
            "positions": draw.integers(draw.rng.integers(0, max_positions, (1, num_tokens))),
            "norm": norm_weight(draw, "rms", s.rank),
            "rotary": None,
        }
        if has_rotary:
            angles = draw.rng.uniform(-3, 3, (max_positions, s.rotated // 2))
            cos_sin = draw.wide(1.2 * np.concatenate((np.cos(angles), np.sin(angles)), 1))
            arguments["rotary"] = RotaryTable(cos_sin, s.rotated, interleaved)
        return by_row("latent_store", arguments)

    return Case("latent_store", name, prepare)


def _fill(latents: LayerLatents, draw: Draw, rows: PagedRows, table: np.ndarray) -> None:
    """Values where the rows may read."""
    size = latents.block_size
    for row, (_, length) in enumerate(rows.lengths):
        for first in range(0, length, size):
            count = min(size, length - first)
            values = draw.of(draw.rng.standard_normal((count, latents.width)))
            latents.data[int(table[row, first // size]), :count] = values


def _attend(
    name: str,
    lengths: Sequence[tuple[int, int]],
    s: Sizes = Sizes(),  # noqa: B008  (frozen)
    *,
    is_strided: bool = False,
    is_shared: bool = False,
    is_bench: bool = False,
    by_token: bool = False,
) -> Case:
    """by_token: the single calls are of one new token each, not of one row."""
    rows = PagedRows(tuple(lengths), PagedShape(block_size=s.block_size))
    new = int(rows.query_start[-1])

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        table, pool = tables(rows, draw.rng)
        latents = _memory(ops, pool, s, draw, is_shared)
        _fill(latents, draw, rows, table)
        make = draw.strided if is_strided else draw.normal
        q, turned = (make(new, s.heads, width) for width in (s.rank, s.rotated))

        def arguments(part: StepPart) -> Arguments:
            first, starts, *_ = part
            own = slice(first, first + int(starts[-1]))
            plan = plan_of(ops.plan_latent, draw, table, s.block_size, part)
            memory = {"latents": latents, "plan": plan, "scale": SCALE}
            return {"q": q[own], "q_rotated": turned[own], **memory}

        parts = rows.each_token() if by_token else rows.each_row()
        singles = () if is_bench else tuple(map(arguments, parts))
        return Prepared(arguments(rows.whole_step()), singles)

    return Case("latent_attend", name, prepare, is_bench=is_bench)


ODD = Sizes(5, 19, 6, 3)
WIDE = Sizes(20, 40, 8, 16)


def token_by_token(s: Sizes = WIDE) -> Case:
    """New tokens of requests, together and each by itself: a chunk of a prompt, or drafts that are
    verified, must have the bits of one token after the other.
    """
    lengths = ((5, 1100), (1, 9), (70, 75), (9, 520), (2, 257))
    return _attend(f"token_by_token-{s.heads}x{s.rank}", lengths, s, by_token=True)


def _hostile() -> list[Case]:
    return [
        _heads(0, 3, 8, 5),
        _heads(1, 3, 8, 5),
        _heads(9, 2, 33, 40),
        _heads(5, 4, 130, 64, is_strided=True),
        _heads(2, 1, 1, 1),
        *(_store(f"halves-{tokens}", tokens) for tokens in (0, 1, 9)),
        _store("interleaved", 5, interleaved=True),
        _store("none", 5, has_rotary=False),
        _store("padding", 7, padding=3),
        _store("odd-strided", 5, ODD, is_strided=True, interleaved=True),
        _store("wide-shared", 9, WIDE, is_shared=True, padding=2),
        _attend("no_tokens", ()),
        _attend("mixed", MIXED),
        _attend("decode", DECODE),
        _attend("one_row", ((1, 10),), is_strided=True),
        _attend("one_chunk", ((6, 10),), is_strided=True),
        _attend("mixed-odd", MIXED, ODD, is_strided=True),
        _attend("mixed-wide-shared", MIXED, WIDE, is_shared=True),
        _attend("row_without_new_tokens", ((1, 4), (0, 6), (3, 8))),
        _attend("ragged", RAGGED, ODD),
        _attend("long", LONG, WIDE),
    ]


def _benches() -> list[Case]:
    lite = Sizes(16, 512, 64, 16)  # DeepSeek-V2-Lite
    return [
        _heads(1, 16, 128, 512, bench="absorb_lite_1"),
        _heads(1, 16, 512, 128, bench="values_lite_1"),
        _heads(512, 16, 128, 512, bench="absorb_lite_512"),
        _attend("decode_lite_1x4096", ((1, 4096),), lite, is_bench=True),
        _attend("decode_lite_8x4096", ((1, 4096),) * 8, lite, is_bench=True),
        _attend("prefill_lite_512", ((512, 512),), lite, is_bench=True),
    ]


CASES = (*_hostile(), *_benches())
