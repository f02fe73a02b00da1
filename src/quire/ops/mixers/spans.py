"""Spans of a prompt whose tokens see each other in both directions, as rows of their own.

Keys are stored after their rotation, so attention reads no positions but those at which a row's new
tokens are: a row is cut where a span begins and where it ends, and the pieces have the same blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """Positions [start, stop) of a prompt whose tokens see all of them; within the window of the
    layer unless `is_wide`.
    """

    start: int
    stop: int
    is_wide: bool = False


class RowsOfSpans(NamedTuple):
    """The pieces in order, as `SpanPlan.refill_spans` takes them: int32 each, `query_start` [R+1],
    and [R] `seq_lens`, `rows`, and `whole`, 1 for the pieces that are a span, 2 where it is wide.
    """

    query_start: np.ndarray
    seq_lens: np.ndarray
    rows: np.ndarray
    whole: np.ndarray


def cut_at_spans(
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    rows: np.ndarray,
    spans: Mapping[int, Sequence[Span]],
) -> RowsOfSpans | None:
    """Cut a step's rows at the spans, by the entries of `rows`, ascending; None where no span is
    among the new tokens. A step has a span whole or not at all.
    """
    pieces: list[tuple[int, int, int, int]] = []
    for row, num_new, length in zip(
        rows.tolist(), np.diff(query_start).tolist(), seq_lens.tolist(), strict=True
    ):
        position = length - num_new
        for start, stop, is_wide in spans.get(row, ()):
            if stop <= position or start >= length:
                continue
            assert position <= start and stop <= length, "a step has a part of a span"
            if position < start:
                pieces.append((start - position, start, row, 0))
            pieces.append((stop - start, stop, row, 1 + is_wide))
            position = stop
        if position < length or not num_new:
            pieces.append((length - position, length, row, 0))
    counts, ends, table_rows, whole = np.array(pieces, dtype=np.int32).reshape(-1, 4).T.copy()
    if not whole.any():
        return None
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return RowsOfSpans(starts, ends, table_rows, whole)
