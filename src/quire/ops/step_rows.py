"""The rows of a step, as plans of attention take them, and attention within chunks of positions as
ordinary attention of more rows.

Keys are stored after their rotation, so attention itself reads no positions: a query that sees only
the tokens of its own chunk is one of a sequence that begins where the chunk does. A row's new
tokens are cut where a chunk begins, and each piece becomes a row that has the blocks of its chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor


class StepRows(NamedTuple):
    """`query_start` [R+1] and `seq_lens` [R] as for `plan_attention`, but row i of the step is row
    `rows[i]` of `block_table` [*, B]; all are int32. `on_device`: the same table where a device has
    it, for kernels that look rows up themselves.
    """

    query_start: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    rows: np.ndarray
    on_device: Tensor | None = None


def cut_at_chunks(step: StepRows, *, block_size: int, chunk: int) -> StepRows:
    """The pieces, in order, of rows that are cut where positions are multiples of `chunk`, which is
    one of `block_size`.
    """
    query_start, seq_lens, block_table, rows, _ = step
    assert chunk % block_size == 0, "a chunk begins with a block"
    num_new = np.diff(query_start)
    first = seq_lens - num_new
    first_chunk = first // chunk
    num_pieces = -(-seq_lens // chunk) - first_chunk
    row = np.repeat(np.arange(len(seq_lens)), num_pieces)
    before = np.cumsum(num_pieces) - num_pieces
    start = (first_chunk[row] + np.arange(len(row)) - before[row]) * chunk
    end = np.minimum(seq_lens[row], start + chunk)
    counts = end - np.maximum(first[row], start)
    lengths = end - start
    width = -(-int(lengths.max(initial=0)) // block_size)
    columns = (start // block_size)[:, None] + np.arange(width)
    # pieces shorter than the longest do not read what is beyond their end
    columns = np.minimum(columns, block_table.shape[1] - 1)
    return StepRows(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        lengths.astype(np.int32),
        np.ascontiguousarray(block_table[rows[row][:, None], columns], dtype=np.int32),
        np.arange(len(row), dtype=np.int32),
    )
