"""New tokens of a request, together and each by itself as decoding gives them: a chunk of a prompt,
or drafts that are verified, must have the bits of one token after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from quire.ops import AttentionArgs
from quire.ops.catalog import Ops
from tests.support.op_cases.case import Case, Draw, Prepared
from tests.support.op_cases.paged import PagedRows, PagedShape, _fill, tables

LENGTHS = ((5, 140), (1, 9), (70, 75))
"""New tokens, and tokens with them, of each request."""


def token_by_token(
    window: int | None = None,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    shape: PagedShape = PagedShape(4, 2, 8, 4),  # noqa: B008  (frozen)
    stored: torch.dtype | None = None,
    odd_values: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> Case:
    """Attention of several new tokens of each request; `stored` and `odd_values`: see `_fill`."""
    whole = PagedRows(tuple(lengths), shape)  # every token may see from the first key on
    rows = PagedRows(tuple(lengths), shape, window)
    new = sum(count for count, _ in lengths)

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        table, pool = tables(whole, draw.rng)
        kv = _fill(ops, draw, whole, table, pool, stored, odd_values=odd_values)
        q = draw.normal(new, shape.heads, shape.head_dim)
        args = AttentionArgs(scale=0.6, window=window)

        def arguments(q: Any, starts: Any, lengths: Any, table: Any) -> dict[str, Any]:
            plan = ops.plan_attention(
                query_start=np.array(starts, dtype=np.int32),
                seq_lens=np.array(lengths, dtype=np.int32),
                block_table=torch.from_numpy(table).to(draw.device),
                block_size=shape.block_size,
                window=window,
            )
            return {"q": q, "kv": kv, "plan": plan, "args": args}

        singles: list[dict[str, Any]] = []
        for row, (count, length) in enumerate(lengths):
            for seen in range(length - count + 1, length + 1):
                at = len(singles)
                one = arguments(q[at : at + 1], [0, 1], [seen], table[row : row + 1])
                singles.append(one)
        return Prepared(arguments(q, rows.query_start, rows.seq_lens, table), tuple(singles))

    traits = "" if stored is None else f"-{str(stored).removeprefix('torch.')}"
    if odd_values:
        traits += "-odd_values"
    if shape.heads > 4:
        traits += f"-{shape.heads}x{shape.head_dim}"
    return Case("attend", f"token_by_token-window{window}{traits}", prepare)
