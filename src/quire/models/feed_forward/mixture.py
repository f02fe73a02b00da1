"""Mixtures of experts as parts of a decoder: the router, the chosen experts here or on other cores,
and the shared expert. Made by `assembly.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.layers import FeedForward, Projection
from quire.ops import ExpertWeights, LinearWeight, MoeArgs, Ops, RouteArgs
from quire.ops.moe import grouped_mixture

ChosenExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""h [T, C], chosen experts [T, k], their weights [T, k] -> [T, C]."""


@dataclass(frozen=True, slots=True)
class Router:
    """The choice of experts for each token."""

    ops: Ops
    logits: Projection
    args: RouteArgs
    select_bias: Tensor | None

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [T, C] -> chosen experts [T, k] int32, and their weights [T, k] fp32."""
        chosen, weights = self.ops.route(self.logits(h), self.args, self.select_bias)
        return chosen, weights


@dataclass(frozen=True, slots=True)
class RecordedRouter:
    """A router whose choices are appended to `choices`."""

    router: Router
    choices: list[Tensor]

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [T, C] -> chosen experts [T, k] int32, and their weights [T, k] fp32."""
        chosen, weights = self.router(h)
        self.choices.append(chosen)
        return chosen, weights


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """A feed-forward part in which a router sends each token to a few experts."""

    router: Router | RecordedRouter
    experts: ChosenExperts

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.experts(h, *self.router(h))


@dataclass(frozen=True, slots=True)
class WithSharedExpert:
    """A mixture and a feed-forward part that all tokens go through, added after each is rounded."""

    ops: Ops
    routed: FeedForward
    shared: FeedForward

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        total: Tensor = self.ops.add(self.routed(h), self.shared(h))
        return total


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """A feed-forward part times the sigmoid of one number per token."""

    ops: Ops
    feed: FeedForward
    gate: LinearWeight

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        y: Tensor = self.ops.scale_gate(self.feed(h), self.ops.linear(h, self.gate))
        return y


@dataclass(frozen=True, slots=True)
class DistributedExperts:
    """Experts that are distributed over cores: `exchange` sends each token to its chosen experts on
    any core (distributed/expert_exchange.py).
    """

    num_experts: int
    exchange: Callable[[Tensor, list[int]], Tensor]
    args: MoeArgs

    def __call__(self, h: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """h [T, C], chosen and weights [T, k] -> [T, C]."""
        return grouped_mixture(h, chosen, weights, self.num_experts, self.args, self.exchange)


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """Experts of a layer that are run one by one, each as a mixture of one with weight 1."""

    ops: Ops
    experts: tuple[ExpertWeights, ...]
    args: MoeArgs

    def __call__(self, expert: int, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        chosen = torch.zeros(len(h), 1, dtype=torch.int32, device=h.device)
        weights = torch.ones(len(h), 1, device=h.device)
        y: Tensor = self.ops.moe(h, chosen, weights, self.experts[expert], self.args)
        return y


def make_wide_logits(ops: Ops, router: LinearWeight) -> Projection:
    """A router's logits [T, E] as they are summed, in fp32."""
    return lambda h: ops.linear_partial(h, router)[:, 0]
