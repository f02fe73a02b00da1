"""Mixture of experts: packing at load, routing, and the experts' feed-forward layers.

They belong to the format "linear", since `moe` multiplies with a router that `pack_linear` packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from quire.ops.activation import gated, gated_with_limit
from quire.ops.linear import LinearWeight, Plain, linear, pack_linear
from quire.ops.quantized import WeightFormat
from quire.ops.registry import WIDE, op


@dataclass(frozen=True, slots=True)
class MoeArgs:
    """How tokens choose experts and how the chosen ones' results are weighed.

    score: "softmax" over all experts, "sigmoid" of each, or "softmax_topk", softmax over the chosen
    logits only. renorm: the chosen scores are divided by their sum (not for softmax_topk, whose sum
    is 1); then times `scale`. groups > 1: only experts of the top_groups groups with the best sum
    of two scores are eligible (DeepSeek-V3). clamp: gpt-oss's limited gate instead of `act`.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_topk"]
    renorm: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    act: str = "silu"
    clamp: float | None = None

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.experts and self.experts % self.groups == 0
        assert self.clamp is None or self.act == "silu"


class ExpertWeights(Protocol):
    """The packed weights of all experts of a layer."""

    experts: int


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """One gate/up and one down weight per expert, in a provider's format of such weights. Those of
    plain torch are views of the packed tensors.
    """

    experts: int
    up: tuple[Any, ...]
    down: tuple[Any, ...]


@op(format="linear")
def pack_experts(
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    stored_as: WeightFormat | None = None,
    segments: int = 1,
) -> SeparateExperts:
    """Take gate_up [E, 2F, C] (gate rows, then up rows), down [E, C, F] and biases [E, 2F], [E, C]
    into the format; `stored_as` is that of `pack_linear`, `segments` those of down's inputs.

    Plain torch keeps the caller's tensors (no copy) where they are not rounded.
    """
    assert down.shape == (len(gate_up), gate_up.shape[2], gate_up.shape[1] // 2)
    up = pack_each(pack_linear, gate_up, gate_up_bias, stored_as)
    pack_down = partial(pack_linear.definition, segments=segments)
    return SeparateExperts(len(up), up, pack_each(pack_down, down, down_bias, stored_as))


def pack_each(
    pack: Callable[..., Any],
    weight: Tensor,
    bias: Tensor | None,
    stored_as: WeightFormat | None,
) -> tuple[Any, ...]:
    """The experts of weight [E, out, in] and bias [E, out], each packed by itself."""
    biases = [None] * len(weight) if bias is None else bias.unbind()
    pairs = zip(weight.unbind(), biases, strict=True)
    return tuple(pack(w, b, stored_as) for w, b in pairs)


@op(format="linear")
def moe(
    x: Tensor,
    router: LinearWeight,
    experts: SeparateExperts,
    args: MoeArgs,
    select_bias: Tensor | None = None,
) -> Tensor:
    """Each token's top_k experts, weighed and summed in fp32 in top-k order: x [T, C] -> [T, C].

    router maps C to E; select_bias [E] joins the scores for the choice only (DeepSeek-V3). Equal
    scores are chosen in an order that torch leaves open.
    """

    def expert(index: int, rows: Tensor) -> Tensor:
        return _expert(rows, experts.up[index], experts.down[index], args)

    return mixture(x, linear(x, router), args, select_bias, expert)


def mixture(
    x: Tensor,
    logits: Tensor,
    args: MoeArgs,
    select_bias: Tensor | None,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """`moe` for given router logits [T, E] and `expert(index, rows [n, C]) -> [n, C]`."""

    def run(rows: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts)
        found = [expert(index, part) for index, part in enumerate(parts) if len(part)]
        return torch.cat(found) if found else rows

    return grouped_mixture(x, logits, args, select_bias, run)


def grouped_mixture(
    x: Tensor,
    logits: Tensor,
    args: MoeArgs,
    select_bias: Tensor | None,
    run: Callable[[Tensor, list[int]], Tensor],
) -> Tensor:
    """The same for `run(rows [T*k, C], counts [E]) -> [T*k, C]`: all chosen experts at once, the
    first counts[0] rows for expert 0 and so on.
    """
    num_tokens, width = x.shape
    chosen, weights = route(logits, args, select_bias)
    order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs grouped by expert
    counts = torch.bincount(chosen.flatten(), minlength=args.experts).tolist()
    results = x.new_empty(num_tokens * args.top_k, width)
    results.index_copy_(0, order, run(x[order // args.top_k], counts))
    return _weighted_sum(results.view(num_tokens, args.top_k, width), weights).to(x.dtype)


def _expert(x: Tensor, up: Plain, down: Plain, args: MoeArgs) -> Tensor:
    h = up.multiply(x)
    h = gated(h, args.act) if args.clamp is None else gated_with_limit(h, args.clamp)
    return down.multiply(h)


def _weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """y [T, k, C] times weights [T, k], added one choice after the other, in the weights' type ->
    [T, C].
    """
    total = y[:, 0] * weights[:, 0, None]
    for i in range(1, y.shape[1]):
        total += y[:, i] * weights[:, i, None]
    return total


def route(logits: Tensor, args: MoeArgs, select_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> chosen experts [T, k] int64, best first, and their weights [T, k]
    fp32.
    """
    logits = logits.to(WIDE[logits.dtype])
    scores = logits
    if args.score == "softmax":
        scores = logits.softmax(-1)
    elif args.score == "sigmoid":
        scores = logits.sigmoid()
    eligible = scores if select_bias is None else scores + select_bias
    if args.groups > 1:
        eligible = _best_groups(eligible, args)
    chosen = eligible.topk(args.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if args.score == "softmax_topk":
        weights = weights.softmax(-1)
    elif args.renorm:
        # DeepSeek-V3's constant: its sigmoids may all be 0, while a softmax's best is at least 1/E
        tiny = 1e-20 if args.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + tiny)
    return chosen, weights * args.scale


def _best_groups(scores: Tensor, args: MoeArgs) -> Tensor:
    """scores [T, E], -inf outside the groups whose two best scores have the largest sums."""
    grouped = scores.unflatten(1, (args.groups, -1))
    best_two = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1)
    keep = torch.zeros_like(best_two, dtype=torch.bool)
    keep.scatter_(1, best_two.topk(args.top_groups, -1).indices, True)
    return grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(1)
