"""Plain torch's attention plan: which lanes of KV memory each row reads, in what groups, under
which masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.ops.step_rows import StepRows

TILE = 512
"""New tokens of a row that are attended to at once: bounds the mask, and skips keys that none of
them sees.
"""

SMALL_LANES = 1024
"""Padded lanes below which one larger gather is cheaper than two calls."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive new tokens of one row and the keys that they can see.

    `tokens` index the step's tokens, `keys` the row's gathered lanes; the last key belongs to the
    last token. is_causal: token i sees the keys 0..i and the tile has as many keys as tokens, so
    that no mask is needed. whole: its tokens see those after them (1), and each other beyond the
    window (2).
    """

    tokens: slice
    keys: slice
    is_causal: bool
    whole: int = 0

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row with more than one new token: the lanes of all keys that any of them sees, and its
    tiles.
    """

    lanes: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with one new token that are attended to together.

    tokens: their places among the step's tokens; lanes [R * L] int64, padded with lane 0, which
    holds zeros; spans [R] the number of keys of each row.
    """

    tokens: slice | Tensor
    lanes: Tensor
    spans: np.ndarray
    is_padded: bool
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def span(self) -> int:
        """L, the lanes of each row."""
        return self.lanes.shape[0] // len(self.spans)

    @property
    def distance(self) -> Tensor:
        """Key's position - query's, [R, 1, 1, L] fp32; above 0 where a lane is padding."""
        spans = torch.from_numpy(self.spans).to(self.lanes.device, torch.float32)
        steps = torch.arange(1, self.span + 1, device=self.lanes.device)
        return steps - spans[:, None, None, None]

    def bias(self, dtype: torch.dtype, piece: slice) -> Tensor | None:
        """0 where a lane is a key, -inf where it is padding, of some rows; made once per dtype."""
        if not self.is_padded:
            return None
        if dtype not in self._biases:
            self._biases[dtype] = _bias(self.distance <= 0, dtype)
        return self._biases[dtype][piece]


@dataclass(frozen=True, slots=True)
class PlainPlan:
    """One step's rows for one KV group; num_new and seq_lens [R] are the plan's own.

    Tiles of all rows share one mask [t, L]: seen from the last token and the last key, it is the
    same for all.
    """

    window: int | None
    decode: tuple[DecodeRows, ...]
    prefill: tuple[PrefillRow, ...]
    num_new: np.ndarray
    seq_lens: np.ndarray
    device: torch.device
    block_size: int
    _distances: list[Tensor] = field(default_factory=list)
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See `AttentionPlan`."""
        return self.num_new, self.seq_lens

    def refill(self, step: StepRows) -> PlainPlan:
        """A plan for another step; see `AttentionPlan`."""
        return self.refill_spans(step, np.zeros(len(step.rows), dtype=np.int32))

    def refill_spans(self, step: StepRows, whole: np.ndarray) -> PlainPlan:
        """The same with spans; see `SpanPlan`."""
        width = -(-int(step.seq_lens.max(initial=0)) // self.block_size)
        table = torch.from_numpy(step.block_table[step.rows, :width]).to(self.device)
        facts = self.block_size, self.window, whole
        return plan_rows(step.query_start, step.seq_lens, table, *facts)

    def tile_distance(self, tile: Tile) -> Tensor:
        """Key's position - query's, [n, L] fp32."""
        return _last(self._distance(), tile)

    def tile_bias(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """0 where a token of the tile sees a key, else -inf, [n, L]."""
        if tile.whole:
            distance = self.tile_distance(tile)
            own = slice(distance.shape[1] - tile.num_tokens, None)
            visible = self._visible(distance)
            visible[:, own] = True if tile.whole > 1 else self._is_near(distance[:, own])
            return _bias(visible, dtype)
        if dtype not in self._biases:
            self._biases[dtype] = _bias(self._visible(self._distance()), dtype)
        return _last(self._biases[dtype], tile)

    def _visible(self, distance: Tensor) -> Tensor:
        return (distance <= 0) & self._is_near(distance)

    def _is_near(self, distance: Tensor) -> Tensor:
        return distance > (-math.inf if self.window is None else -self.window)

    def _distance(self) -> Tensor:
        # once for all layers that need it, since it is as large as a mask
        if not self._distances:
            self._distances.append(_distance(self.prefill, self.device))
        return self._distances[0]


def _last(square: Tensor, tile: Tile) -> Tensor:
    rows, columns = tile.tokens.stop - tile.tokens.start, tile.keys.stop - tile.keys.start
    return square[square.shape[0] - rows :, square.shape[1] - columns :]


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))


def plan_rows(
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    block_table: Tensor,
    block_size: int,
    window: int | None,
    whole: np.ndarray | None = None,
) -> PlainPlan:
    """See `attention.plan_attention`, and for `whole` [R] `attention.SpanPlan`."""
    num_new = query_start[1:] - query_start[:-1]
    assert len(num_new) == len(seq_lens) == block_table.shape[0]
    assert (num_new <= seq_lens).all(), "a row has more new tokens than tokens"
    first = _first_seen(num_new, seq_lens, window)
    lanes = _Lanes(block_table, block_size)
    decode = tuple(
        _decode_rows(group, query_start, first, seq_lens, lanes)
        for group in _decode_groups((num_new == 1).nonzero()[0], seq_lens - first)
    )
    prefill = tuple(
        _prefill_row(
            row,
            query_start,
            seq_lens,
            int(first[row]),
            window,
            lanes,
            whole=0 if whole is None else int(whole[row]),
        )
        for row in (num_new > 1).nonzero()[0].tolist()
    )
    return PlainPlan(
        window, decode, prefill, num_new, seq_lens.copy(), block_table.device, block_size
    )


def _first_seen(num_new: np.ndarray, seq_lens: np.ndarray, window: int | None) -> np.ndarray:
    """[R]: the first key that the row's first new token sees."""
    if window is None:
        return np.zeros_like(seq_lens)
    return np.maximum(seq_lens - num_new + 1 - window, 0)


class _Lanes:
    """Looks lanes up in a block table."""

    def __init__(self, block_table: Tensor, block_size: int) -> None:
        self.block_table = block_table
        self.block_size = block_size
        self.device = block_table.device

    def of_row(self, row: int, first: int, stop: int) -> Tensor:
        """Lanes of positions first..stop-1, int64."""
        size = self.block_size
        first_block = first // size
        blocks = self.block_table[row, first_block : -(-stop // size)].to(torch.int64)
        offsets = torch.arange(1, size + 1, device=self.device)  # lane = slot + 1
        lanes = (blocks.unsqueeze(1) * size + offsets).flatten()
        return lanes[first - first_block * size : stop - first_block * size]

    def of_rows(self, rows: np.ndarray, first: np.ndarray, spans: np.ndarray) -> Tensor:
        """Lanes of positions first .. first + span - 1 of each row, padded with 0; flat [R * L]."""
        steps = np.arange(spans.max())
        blocks, offsets = np.divmod(first[:, None] + steps, self.block_size)
        width = self.block_table.shape[1]
        # positions beyond a row's end may lie beyond the table; their lanes become 0 below
        entries = np.minimum(blocks, width - 1) + rows[:, None] * width
        entries = torch.from_numpy(entries).to(self.device)
        lanes = self.block_table.take(entries).to(torch.int64) * self.block_size
        lanes += torch.from_numpy(offsets + 1).to(self.device)
        if spans.min() < spans.max():
            lanes *= torch.from_numpy(steps < spans[:, None]).to(self.device)
        return lanes.view(-1)


def _decode_groups(rows: np.ndarray, spans: np.ndarray) -> Iterator[np.ndarray]:
    """Cut rows into groups of similar length, so that padding at most doubles the gather; order
    kept where possible.
    """
    if not len(rows):
        return
    padded = len(rows) * int(spans[rows].max())
    if padded <= max(SMALL_LANES, 2 * int(spans[rows].sum())):
        yield rows
        return
    rows = rows[np.argsort(-spans[rows], kind="stable")]
    while len(rows):
        is_near = 2 * spans[rows] >= spans[rows[0]]
        # in the step's order again: neighbours make a slice
        yield np.sort(rows[is_near])
        rows = rows[~is_near]


def _decode_rows(
    rows: np.ndarray,
    query_start: np.ndarray,
    first: np.ndarray,
    seq_lens: np.ndarray,
    lanes: _Lanes,
) -> DecodeRows:
    begin = first[rows].astype(np.int64)
    spans = seq_lens[rows] - begin
    return DecodeRows(
        tokens=_as_slice(query_start[rows], lanes.device),
        lanes=lanes.of_rows(rows, begin, spans),
        spans=spans,
        is_padded=bool(spans.min() < spans.max()),
    )


def _as_slice(indices: np.ndarray, device: torch.device) -> slice | Tensor:
    """Increasing indices as a slice where they have no gap: a view instead of a copy."""
    start, stop = int(indices[0]), int(indices[-1]) + 1
    if stop - start == len(indices):
        return slice(start, stop)
    return torch.from_numpy(indices.astype(np.int64)).to(device)


def _prefill_row(
    row: int,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    first: int,
    window: int | None,
    lanes: _Lanes,
    *,
    whole: int,
) -> PrefillRow:
    begin, end, length = int(query_start[row]), int(query_start[row + 1]), int(seq_lens[row])
    computed = length - (end - begin)
    if whole:
        all_keys = Tile(slice(begin, end), slice(0, length - first), False, whole)
        return PrefillRow(lanes.of_row(row, first, length), (all_keys,))
    # torch's own causal mask takes no memory
    if computed == 0 and (window is None or window >= length):
        prompt = Tile(slice(begin, end), slice(0, length), is_causal=True)
        return PrefillRow(lanes.of_row(row, 0, length), (prompt,))
    tiles = []
    for start in range(begin, end, TILE):
        stop = min(start + TILE, end)
        low, high = computed + start - begin, computed + stop - begin  # positions of the tile
        seen_from = max(low + 1 - window, first) if window else first
        tiles.append(Tile(slice(start, stop), slice(seen_from - first, high - first), False))
    return PrefillRow(lanes.of_row(row, first, length), tuple(tiles))


def _distance(prefill: tuple[PrefillRow, ...], device: torch.device) -> Tensor:
    """[t, L] for the longest tile and the most keys of any tile: entry (-1, -1) is the last token's
    own key.
    """
    tiles = [tile for row in prefill for tile in row.tiles]
    num_tokens = max((t.tokens.stop - t.tokens.start for t in tiles), default=0)
    num_keys = max((t.keys.stop - t.keys.start for t in tiles), default=0)
    queries = torch.arange(1 - num_tokens, 1, device=device, dtype=torch.float32)
    keys = torch.arange(1 - num_keys, 1, device=device, dtype=torch.float32)
    return keys - queries.unsqueeze(1)
