"""Rows cut at spans: tokens of a span see all of it, all others what is before them."""

import numpy as np
import pytest
import torch

from quire.hardware.native import find_native
from quire.ops import AttentionArgs, select
from quire.ops.mixers.spans import Span, cut_at_spans
from quire.ops.step_rows import StepRows

SIZE, HEADS, DIM = 4, 4, 8
PROVIDERS = [("torch",), pytest.param(("cpu", "torch"), marks=pytest.mark.skipif(
    find_native()[0] is None, reason="the native module is not built"
))]  # fmt: skip
STEPS = {
    "one span": ([(0, 12)], {0: [Span(2, 9)]}),
    "a span that is a chunk": ([(5, 15)], {0: [Span(5, 15, is_wide=True)]}),
    "a span of one token": ([(3, 9)], {0: [Span(4, 5)]}),
    "several, and rows without": (
        [(20, 21), (0, 30), (7, 13), (17, 290)],
        {
            1: [Span(0, 7), Span(7, 9, is_wide=True), Span(20, 30)],
            3: [Span(1, 16, is_wide=True), Span(20, 280)],
        },
    ),
}
"""Positions of each row's new tokens, and the spans of rows."""


SPANS = [Span(0, 2), Span(4, 7), Span(7, 9, is_wide=True)]


def step_of(spans):
    starts = np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32)
    return starts, np.array([stop for _, stop in spans], dtype=np.int32)


def test_rows_without_a_span_among_new_tokens_stay_as_they_are():
    starts, lengths = step_of([(0, 5), (9, 10)])
    rows = np.arange(2, dtype=np.int32)
    assert cut_at_spans(starts, lengths, rows, {1: [Span(2, 9)], 7: [Span(0, 3)]}) is None


def test_pieces_begin_and_end_where_spans_do():
    starts, lengths = step_of([(2, 12), (4, 5)])
    cut = cut_at_spans(starts, lengths, np.array([3, 1], np.int32), {3: SPANS})
    assert cut.query_start.tolist() == [0, 2, 5, 7, 10, 11]
    assert cut.seq_lens.tolist() == [4, 7, 9, 12, 5]
    assert cut.rows.tolist() == [3, 3, 3, 3, 1]
    assert cut.whole.tolist() == [0, 1, 2, 0, 0]
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in cut)


@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("providers", PROVIDERS, ids="-".join)
def test_tokens_of_a_span_see_all_of_it(providers, name, window):
    ops = select(device="cpu", dtype=torch.float32, providers=providers)
    check(ops, *STEPS[name], window, is_invariant=providers[0] != "torch")


def check(ops, new, spans, window, *, is_invariant):
    """Compare with sums in fp64, and with the bits of rows alone where these are promised."""
    starts, lengths = step_of(new)
    rows = np.arange(len(new), dtype=np.int32)
    rng, blocks = torch.Generator().manual_seed(3), 80
    table = np.random.default_rng(5).permutation(blocks * len(new)).reshape(-1, blocks)
    table = table.astype(np.int32)
    count = int(table.size)
    kv = ops.allocate_kv(count, SIZE, 2, DIM, torch.float32)
    stored = torch.randn(count, 2, SIZE, 2, DIM, generator=rng)
    ops.import_kv(kv, range(count), stored)
    q = torch.randn(int(starts[-1]), HEADS, DIM, generator=rng)
    args = AttentionArgs(scale=0.4, softcap=2.0, window=window)

    def attended(q, starts, lengths, rows):
        plan = ops.plan_attention(
            query_start=np.zeros(1, np.int32),
            seq_lens=np.zeros(0, np.int32),
            block_table=torch.zeros((0, 1), dtype=torch.int32),
            block_size=SIZE,
            window=window,
        )
        cut = cut_at_spans(starts, lengths, rows, spans)
        if cut is None:
            return ops.attend(q, kv, plan.refill(StepRows(starts, lengths, table, rows)), args)
        pieces = StepRows(cut.query_start, cut.seq_lens, table, cut.rows)
        plan = plan.refill_spans(pieces, cut.whole)
        return ops.attend(q, kv, plan, args)

    found = attended(q, starts, lengths, rows)
    token = 0
    for row, (first, stop) in enumerate(new):
        keys, values = (
            x[table[row].tolist()].flatten(0, 1).transpose(0, 1).repeat_interleave(2, 0).double()
            for x in stored.unbind(1)
        )
        for at in range(first, stop):
            low, high = 0 if window is None else max(0, at - window + 1), at + 1
            for start, end, is_wide in spans.get(row, ()):
                if start <= at < end:
                    low, high = min(low, start) if is_wide else low, end
            k, v = keys[:, low:high], values[:, low:high]
            scores = torch.einsum("hd,hjd->hj", q[token].double(), k) * 0.4
            weights = ((scores / 2.0).tanh() * 2.0).softmax(-1)
            expected = torch.einsum("hj,hjd->hd", weights, v).flatten().float()
            torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-5)
            token += 1
    if not is_invariant:
        return
    for row, (first, stop) in enumerate(new):  # the same bits alone
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        alone = attended(q[tokens], *step_of([(first, stop)]), np.array([row], np.int32))
        assert torch.equal(alone, found[tokens])
