"""Rows cut where chunks begin see what attention within chunks sees."""

import numpy as np
import pytest
import torch

from quire.ops import AttentionArgs, select
from quire.ops.step_rows import StepRows, cut_at_chunks

SIZE, CHUNK = 2, 6
OPS = select(device="cpu", dtype=torch.float64, providers=["torch"])
ROWS = {
    "one decode": ([(0, 1)], [0]),
    "decodes around a border": ([(4, 5), (5, 6), (6, 7), (13, 14)], [3, 2, 1, 0]),
    "a prompt of several chunks": ([(0, 20)], [1]),
    "pieces of chunks": ([(3, 8), (6, 12), (5, 19), (11, 12)], [0, 2, 1, 3]),
    "no rows": ([], []),
}
"""Positions of each row's new tokens, and its row of the table."""


def tables(rng):
    return rng.permutation(40).reshape(4, 10).astype(np.int32)


@pytest.mark.parametrize("name", ROWS)
def test_each_piece_has_the_blocks_of_its_chunk(name):
    spans, rows = ROWS[name]
    table = tables(np.random.default_rng(1))
    starts = np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32)
    lengths = np.array([stop for _, stop in spans], dtype=np.int32)
    order = np.array(rows, dtype=np.int64)
    step = StepRows(starts, lengths, table, order)
    cut = cut_at_chunks(step, block_size=SIZE, chunk=CHUNK)
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in cut[:4])
    assert cut.rows.tolist() == list(range(len(cut.seq_lens)))
    assert cut.query_start[-1] == starts[-1]
    seen = []
    for i, length in enumerate(cut.seq_lens):
        for token in range(*cut.query_start[i : i + 2]):
            last = length - cut.query_start[i + 1] + token  # its place in the piece
            slots = [cut.block_table[i, p // SIZE] * SIZE + p % SIZE for p in range(last + 1)]
            seen.append(slots)
    expected = [
        [table[row, p // SIZE] * SIZE + p % SIZE for p in range(at // CHUNK * CHUNK, at + 1)]
        for (start, stop), row in zip(spans, rows, strict=True)
        for at in range(start, stop)
    ]
    assert seen == expected


def test_attention_of_the_pieces_is_attention_within_chunks():
    rng = torch.Generator().manual_seed(1)
    table = tables(np.random.default_rng(2))
    kv = OPS.allocate_kv(40, SIZE, 1, 4, torch.float64)
    OPS.import_kv(kv, range(40), torch.randn(40, 2, SIZE, 1, 4, generator=rng).double())
    spans, rows = ROWS["pieces of chunks"]
    starts = np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32)
    lengths = np.array([stop for _, stop in spans], dtype=np.int32)
    step = StepRows(starts, lengths, table, np.array(rows))
    cut = cut_at_chunks(step, block_size=SIZE, chunk=CHUNK)
    plan = OPS.plan_attention(
        query_start=cut.query_start,
        seq_lens=cut.seq_lens,
        block_table=torch.from_numpy(cut.block_table),
        block_size=SIZE,
        window=None,
    )
    q = torch.randn(int(starts[-1]), 2, 4, generator=rng).double()
    found = OPS.attend(q, kv, plan, AttentionArgs(scale=0.5))
    keys, values = OPS.export_kv(kv, range(40)).unbind(1)
    token = 0
    for (start, stop), row in zip(spans, rows, strict=True):
        k, v = (x[table[row].tolist()].flatten(0, 1)[:, 0] for x in (keys, values))
        for at in range(start, stop):
            mine = slice(at // CHUNK * CHUNK, at + 1)
            weights = (q[token] @ k[mine].T * 0.5).softmax(-1)
            torch.testing.assert_close(found[token], (weights @ v[mine]).flatten())
            token += 1
