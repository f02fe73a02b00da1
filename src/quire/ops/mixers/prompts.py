"""Attention within prompts that a step has whole: a query also sees what follows it, and nothing is
kept for later steps.

Prompts lie one after the other, without padding. A prompt's result depends on nothing but itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.attention import AttentionPlan
from quire.ops.registry import WIDE, op
from quire.ops.step_rows import StepRows

_QUERIES = 128
"""Queries of a prompt whose scores are in memory at once."""


@dataclass(frozen=True, slots=True)
class PlainPrompts:
    """The prompts of a step: prompt r has the tokens query_start[r] .. query_start[r + 1] - 1."""

    query_start: np.ndarray
    window: int | None = None  # layers bring their own

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See `AttentionPlan`."""
        lengths = np.diff(self.query_start)
        return lengths, lengths

    def refill(self, step: StepRows) -> PlainPrompts:
        """A plan for another step; see `AttentionPlan`. No block is looked at."""
        return plan_prompts(query_start=step.query_start, seq_lens=step.seq_lens)


@op(format="prompts", only_for="attention that is not causal")
def plan_prompts(*, query_start: np.ndarray, seq_lens: np.ndarray) -> PlainPrompts:
    """Prepare a step: query_start [R+1] and seq_lens [R] int32 on the host. Each row has all of its
    tokens in the step.
    """
    assert np.array_equal(np.diff(query_start), seq_lens), "a prompt is not whole"
    return PlainPrompts(query_start.copy())


@op(axes={"q": 0, "k": 0, "v": 0}, format="prompts", only_for="attention that is not causal")
def attend_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PlainPrompts,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention of q [T, H, D] over k and v [T, K, D] of the same prompt -> [T, H*D] in q's dtype.

    Query i sees the keys j of its prompt, with a window those with |i - j| < window; scores are
    scale * q.k.
    """
    num_tokens, heads, head_dim = q.shape
    out = q.new_empty(num_tokens, heads, head_dim)
    # rows after the last prompt, which nothing fills
    out[plan.query_start[-1] :] = 0
    for start, stop in zip(plan.query_start[:-1], plan.query_start[1:], strict=True):
        if start == stop:
            continue
        queries, keys, values = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        y = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=_near(int(stop - start), window, q.device),
            scale=scale,
            enable_gqa=k.shape[1] != heads,
        )
        out[start:stop] = y[0].transpose(0, 1)
    return out.flatten(1)


@dataclass(frozen=True, slots=True)
class RelativeScores:
    """Addend to scores by the distance of a key from its query, for H heads of D values.

    `columns` [2R + 1] int64 has the column, of W, for each distance key - query from -R to R; what
    is farther has that of the end. `bias` [H, W] fp32 is added as it is; `keys` and `queries` [H,
    W, D], in the model's dtype, stand for the key and for the query of a product with the other.
    None: nothing is added.
    """

    columns: Tensor
    bias: Tensor | None = None
    keys: Tensor | None = None
    queries: Tensor | None = None


@op(axes={"q": 0, "k": 0, "v": 0}, only_for="relative positions within whole prompts")
def attend_relative(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    relative: RelativeScores,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """`attend_prompts` with scores that depend on distances, too -> [T, H*D] in q's dtype.

    With column c of key j for query i, a score is scale * (q_i.k_j + q_i.keys[c] + queries[c].k_j)
    + bias[c]. `plan` is one of `plan_prompts`.
    """
    num_tokens, heads, head_dim = q.shape
    out = q.new_zeros(num_tokens, heads, head_dim)
    start = 0
    for length in plan.lengths[0].tolist():
        if length:
            rows = slice(start, start + length)
            y = _attend_one(
                *(_by_head(x[rows], heads) for x in (q, k, v)),
                relative=relative,
                scale=scale,
                window=window,
            )
            out[rows] = y.transpose(0, 1).to(q.dtype)
        start += length
    return out.flatten(1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """x [L, K, D] -> [heads, L, D] in the type of reductions."""
    x = x.to(WIDE[x.dtype]).transpose(0, 1)
    return x.repeat_interleave(heads // len(x), 0).contiguous()


def _attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    relative: RelativeScores,
    scale: float,
    window: int | None,
) -> Tensor:
    """q, k and v [H, L, D] of one prompt -> [H, L, D]."""
    r, heads, length = relative, q.shape[0], q.shape[1]
    places = torch.arange(length, device=q.device)
    reach = len(r.columns) // 2
    of_keys = None if r.queries is None else k @ r.queries.to(k.dtype).transpose(1, 2)
    found = []
    for first in range(0, length, _QUERIES):
        some = q[:, first : first + _QUERIES]
        distances = places - places[first : first + _QUERIES, None]
        columns = r.columns[distances.clamp(-reach, reach) + reach]
        scores = some @ k.transpose(1, 2)
        if r.keys is not None:
            products = some @ r.keys.to(q.dtype).transpose(1, 2)
            scores += products.gather(2, columns.expand(heads, -1, -1))
        if of_keys is not None:
            scores += of_keys.gather(2, columns.t().expand(heads, -1, -1)).transpose(1, 2)
        scores *= scale
        if r.bias is not None:
            scores += r.bias.to(scores.dtype)[:, columns]
        if window is not None:
            scores.masked_fill_(distances.abs() >= window, float("-inf"))
        found.append(scores.softmax(2) @ v)
    return torch.cat(found, 1)


def _near(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask of which of `length` tokens see each other; None where all do."""
    if window is None or window >= length:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window
