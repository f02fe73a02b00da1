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

from quire.ops.registry import op


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

    def refill(
        self,
        query_start: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        rows: np.ndarray,
        on_device: Tensor | None = None,
    ) -> PlainPrompts:
        """A plan for another step; see `AttentionPlan`. No block is looked at."""
        return plan_prompts(query_start=query_start, seq_lens=seq_lens)


@op(format="prompts")
def plan_prompts(*, query_start: np.ndarray, seq_lens: np.ndarray) -> PlainPrompts:
    """Prepare a step: query_start [R+1] and seq_lens [R] int32 on the host. Each row has all of its
    tokens in the step.
    """
    assert np.array_equal(np.diff(query_start), seq_lens), "a prompt is not whole"
    return PlainPrompts(query_start.copy())


@op(format="prompts", only_for="attention that is not causal")
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


def _near(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of `length` tokens see each other; None where all do."""
    if window is None or window >= length:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window
