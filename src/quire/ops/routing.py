"""The choice of experts: which of them a token is sent to, and how their results are weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import row_by_row
from quire.ops.registry import WIDE, op

RouterScore = Literal["softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer"]
"""See `RouteArgs`."""


@dataclass(frozen=True, slots=True)
class RouteArgs:
    """The choice of `top_k` experts for tokens, and the weights of the chosen ones' results.

    score: "softmax" over all experts or "sigmoid" of each, by which experts are also chosen;
    "softmax_topk" and "sigmoid_topk": experts are chosen by their logits, and the softmax is over
    the chosen ones only; "sparsemixer": see `_sparsemixer`, for which `jitter` is.

    renorm: the chosen scores are divided by max(their sum + renorm_eps, renorm_min); for "softmax"
    and "sigmoid" only. Then they are multiplied by `scale`. groups > 1: only experts of the
    top_groups groups with the best sum of their `group_best` best scores are eligible, 1 or 2
    (DeepSeek-V2, V3).
    """

    top_k: int
    score: RouterScore
    renorm: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    renorm_eps: float = 1e-20
    renorm_min: float = 0.0
    jitter: float = 0.0
    group_best: int = 2

    def __post_init__(self) -> None:
        assert self.top_k > 0 and 0 < self.top_groups <= self.groups and self.group_best in (1, 2)
        assert self.groups == 1 or self.score in ("softmax", "sigmoid")


@op(axes={"logits": 0}, is_invariant=True)
def route(
    logits: Tensor,
    args: RouteArgs,
    select_bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> chosen experts [T, k] int32, best first, and their weights [T, k]
    fp32.

    select_bias [E] fp32 joins the scores for the choice only (DeepSeek-V3). expert_scales [E] fp32
    multiply the weights at the end (Gemma 4). Equal scores are chosen in an order that torch leaves
    open.
    """
    assert logits.shape[1] >= args.top_k and logits.shape[1] % args.groups == 0
    logits = logits.to(WIDE[logits.dtype])
    if args.score == "sparsemixer":
        chosen, weights = _sparsemixer(logits, args)
    else:
        chosen, weights = _best(logits, args, select_bias)
    return chosen.to(torch.int32), scaled_by_expert(weights * args.scale, chosen, expert_scales)


@op(axes={"logits": 0, "ids": 0}, is_invariant=True, only_for="scores by the root of softplus")
def route_softplus(
    logits: Tensor,
    top_k: int,
    scale: float,
    select_bias: Tensor | None = None,
    ids: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> chosen experts [T, k] int32 and their weights [T, k] fp32: the scores
    sqrt(softplus(logit)) of the chosen ones over their sum, times `scale` (DeepSeek-V4).

    Chosen are the best by score plus select_bias [E] fp32, of equal ones the first; or with a table
    [V, k] int32 the row of each token's id, ids [T].
    """
    scores = row_by_row(_root_of_softplus, logits.to(WIDE[logits.dtype]))
    if table is None:
        eligible = scores if select_bias is None else scores + select_bias
        # of equal scores the lowest expert, which topk does not promise
        chosen = eligible.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    else:
        assert ids is not None, "experts are looked up by ids"
        chosen = table.index_select(0, ids).long()
    weights = scores.gather(1, chosen)
    total = weights[:, :1] + _LEAST_SUM
    for choice in range(1, top_k):
        total = total + weights[:, choice, None]
    return chosen.to(torch.int32), weights / total * scale


_LEAST_SUM = 1e-20


def _root_of_softplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()


def scaled_by_expert(weights: Tensor, chosen: Tensor, scales: Tensor | None) -> Tensor:
    """weights [T, k] times the scales [E] of the chosen experts [T, k]; None: as they are."""
    return weights if scales is None else weights * scales[chosen.long()]


def _best(logits: Tensor, args: RouteArgs, select_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts with the best scores, and their weights before `scale`."""
    scores = logits
    if args.score == "softmax":
        scores = logits.softmax(-1)
    elif args.score == "sigmoid":
        scores = row_by_row(torch.sigmoid, logits)
    eligible = scores if select_bias is None else scores + select_bias
    if args.groups > 1:
        eligible = _best_groups(eligible, args)
    chosen = eligible.topk(args.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if args.score == "softmax_topk":
        weights = weights.softmax(-1)
    elif args.score == "sigmoid_topk":
        weights = row_by_row(torch.sigmoid, weights)
    elif args.renorm:
        # a sum of sigmoids may be 0, while that of a softmax's best is at least 1/E
        total = weights.sum(-1, keepdim=True) + args.renorm_eps
        weights = weights / total.clamp_min(args.renorm_min)
    return chosen, weights


def _best_groups(scores: Tensor, args: RouteArgs) -> Tensor:
    """scores [T, E], -inf outside the groups whose best scores have the largest sums."""
    grouped = scores.unflatten(1, (args.groups, -1))
    best = grouped.topk(min(args.group_best, grouped.shape[2]), -1).values.sum(-1)
    keep = torch.zeros_like(best, dtype=torch.bool)
    keep.scatter_(1, best.topk(args.top_groups, -1).indices, True)
    return grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(1)


def _sparsemixer(logits: Tensor, args: RouteArgs) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE's choice (Liu et al. 2023, SparseMixer): the expert with the largest logit, then
    the largest of the others, and so on. The weight of each is its part in a softmax over the
    experts left whose logit is less than 2 * jitter below the largest, relative to the larger of
    that and its own size.
    """
    left, chosen, weights = logits, [], []
    for _ in range(args.top_k):
        best, index = left.max(-1, keepdim=True)
        size = torch.maximum(logits.abs(), best)
        is_far = (best - logits) / size > 2 * args.jitter
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, index))
        chosen.append(index)
        left = left.scatter(1, index, float("-inf"))
    return torch.cat(chosen, 1), torch.cat(weights, 1)
