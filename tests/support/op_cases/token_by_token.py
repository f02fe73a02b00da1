"""New tokens of a request, together and each by itself as decoding gives them: a chunk of a prompt,
or drafts that are verified, must have the bits of one token after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from quire.ops import AttentionArgs
from quire.ops.catalog import Ops
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared
from tests.support.op_cases.paged import PagedRows, PagedShape, StepPart, _fill, plan_of, tables

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

        def arguments(part: StepPart) -> Arguments:
            first, starts, *_ = part
            plan = plan_of(ops.plan_attention, draw, table, shape.block_size, part, window=window)
            own = q[first : first + int(starts[-1])]
            return {"q": own, "kv": kv, "plan": plan, "args": args}

        return Prepared(arguments(rows.whole_step()), tuple(map(arguments, rows.each_token())))

    traits = "" if stored is None else f"-{str(stored).removeprefix('torch.')}"
    if odd_values:
        traits += "-odd_values"
    if shape.heads > 4:
        traits += f"-{shape.heads}x{shape.head_dim}"
    return Case("attend", f"token_by_token-window{window}{traits}", prepare)
