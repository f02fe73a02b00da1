"""Mixtures of experts in a decoder: router, experts here or on other cores, shared expert."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.distributed.expert_exchange import ExpertExchange, shares_of_experts
from quire.distributed.worker_group import WorkerGroup
from quire.errors import LoadError
from quire.models.adapters.banks import AdapterBanks
from quire.models.feed_forward.dense import inputs_of, make_dense
from quire.models.layers import FeedForward, Projection, StepIds
from quire.models.maker import Maker
from quire.models.spec import DenseAndExperts, Moe
from quire.ops import CodedWeight, ExpertWeights, LinearWeight, MoeArgs, NormWeight, Ops, RouteArgs
from quire.ops.formats.row_stack import RowStack
from quire.ops.moe import grouped_mixture, weighted_sum
from quire.ops.routing import RouterScore

ChosenExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""h [T, C], chosen experts [T, k], their weights [T, k] -> [T, C]."""


@dataclass(frozen=True, slots=True)
class Router:
    """The choice of experts for each token."""

    ops: Ops
    logits: Projection
    args: RouteArgs
    select_bias: Tensor | None
    expert_scales: Tensor | None

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [T, C] -> chosen experts [T, k] int32, and their weights [T, k] fp32."""
        chosen, weights = self.ops.route(
            self.logits(h), self.args, self.select_bias, self.expert_scales
        )
        return chosen, weights


@dataclass(frozen=True, slots=True)
class SoftplusRouter:
    """A choice by the root of softplus, or with a `table` [V, k] by the token's id."""

    ops: Ops
    logits: Projection
    top_k: int
    scale: float
    select_bias: Tensor | None
    table: Tensor | None
    step: StepIds

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [T, C] -> chosen experts [T, k] int32, and their weights [T, k] fp32."""
        ids = None if self.table is None else self.step.ids
        chosen, weights = self.ops.route_softplus(
            self.logits(h), self.top_k, self.scale, self.select_bias, ids, self.table
        )
        return chosen, weights


@dataclass(frozen=True, slots=True)
class RecordedRouter:
    """A router whose choices are appended to `choices`."""

    router: Router | SoftplusRouter
    choices: list[Tensor]

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [T, C] -> chosen experts [T, k] int32, and their weights [T, k] fp32."""
        chosen, weights = self.router(h)
        self.choices.append(chosen)
        return chosen, weights


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """A feed-forward part in which a router sends each token to a few experts."""

    router: Router | SoftplusRouter | RecordedRouter
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
        return self.ops.add(self.routed(h), self.shared(h))


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """A feed-forward part times the sigmoid of one number per token."""

    ops: Ops
    feed: FeedForward
    gate: LinearWeight

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, C] -> [T, C]."""
        return self.ops.scale_gate(self.feed(h), self.ops.linear(h, self.gate))


@dataclass(frozen=True, slots=True)
class DenseAndMixture:
    """A dense part and a mixture of the same residual stream, each between norms of its own; the
    router reads the stream through a third.
    """

    ops: Ops
    dense_pre: NormWeight
    dense: FeedForward
    dense_post: NormWeight
    router_norm: NormWeight
    experts_pre: NormWeight
    mixture: MixtureOfExperts
    experts_post: NormWeight

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, C] -> [T, C]."""
        ops, mixture = self.ops, self.mixture
        dense = ops.norm(self.dense(ops.norm(x, self.dense_pre)), self.dense_post)
        choice = mixture.router(ops.norm(x, self.router_norm))
        routed = mixture.experts(ops.norm(x, self.experts_pre), *choice)
        return ops.add(dense, ops.norm(routed, self.experts_post))


@dataclass(frozen=True, slots=True)
class NarrowExperts:
    """Experts that read and give fewer numbers than a decoder has: products before and after."""

    ops: Ops
    before: LinearWeight
    experts: ChosenExperts
    after: LinearWeight

    def __call__(self, h: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """h [T, C], chosen and weights [T, k] -> [T, C]."""
        narrow = self.experts(self.ops.linear(h, self.before), chosen, weights)
        return self.ops.linear(narrow, self.after)


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


ShareOfExperts = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""Rows [n, C], the expert of each [n], and their adapters' slots [n] -> [n, C]."""


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Experts of which each worker of a group runs some, whole: `owners` [E] are their workers.
    Every worker gets the results of the tokens' choices among its own by `share`, and those of the
    others as they are, so that each token adds the same numbers in the order of its choice.
    """

    group: WorkerGroup
    owners: Tensor
    share: ShareOfExperts
    args: MoeArgs
    adapters: AdapterBanks | None = None

    def __call__(self, h: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """h [T, C], chosen and weights [T, k] -> [T, C], the same on every worker."""
        slots = None if self.adapters is None else self.adapters.slots
        inputs = [h, chosen, weights, *([] if slots is None else [slots])]
        return self.group.apply(self._mixture, inputs, h.shape[1])

    def _mixture(
        self, h: Tensor, chosen: Tensor, weights: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        (num_tokens, width), top_k = h.shape, chosen.shape[1]
        whose = self.owners[chosen.long()]
        token, choice = (whose == self.group.rank).nonzero(as_tuple=True)
        rows = h[token]
        # done here, since experts get each choice as a mixture of one with weight 1
        if self.args.weighs_input:
            rows = rows * weights[token, choice, None].to(h.dtype)
            weights = torch.ones_like(weights)
        results = h.new_zeros(num_tokens, top_k, width)
        own_slots = None if slots is None else slots[token]
        results[token, choice] = self.share(rows, chosen[token, choice], own_slots)
        # by choice and not as sums: these are made in the order of choices, as one worker makes
        # them
        every = self.group.gather(results.flatten(1)).unflatten(2, (top_k, width))
        tokens, choices = torch.arange(num_tokens)[:, None], torch.arange(top_k)
        return weighted_sum(every[tokens, whose, choices], weights).to(h.dtype)


@dataclass(frozen=True, slots=True)
class OwnShare:
    """The share of a worker that has its experts itself, of which `first` is the first."""

    ops: Ops
    experts: ExpertWeights
    first: int
    args: MoeArgs
    adapters: AdapterBanks | None

    def __call__(self, rows: Tensor, chosen: Tensor, slots: Tensor | None) -> Tensor:
        """Rows [n, C], the expert of each [n], and their adapters' slots [n] -> [n, C]."""
        if not len(rows):
            return rows
        own = (chosen[:, None] - self.first).int()
        ones = torch.ones(len(rows), 1, device=rows.device)
        with self._rows_of(slots):
            return self.ops.moe(rows, own, ones, self.experts, self.args)

    def _rows_of(self, slots: Tensor | None) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.rows_of(slots)


@dataclass(frozen=True, slots=True)
class SpreadShare:
    """The share of a worker whose experts are distributed over its twins in all cores: `places` [E]
    are their numbers in `exchange`, which takes place without rows as well.
    """

    exchange: Callable[[Tensor, list[int]], Tensor]
    places: Tensor
    num_places: int

    def __call__(self, rows: Tensor, chosen: Tensor, slots: Tensor | None) -> Tensor:
        """Rows [n, C], the expert of each [n]; there are no adapters -> [n, C]."""
        own = self.places[chosen.long()]
        order = own.argsort(stable=True)
        counts = torch.bincount(own, minlength=self.num_places).tolist()
        return torch.empty_like(rows).index_copy_(0, order, self.exchange(rows[order], counts))


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
        return self.ops.moe(h, chosen, weights, self.experts[expert], self.args)


class MixtureMaker:
    """Builds the mixtures of a model: all experts here, or with `spread` those of this core.
    Routers append the experts that they choose to `choices`; None: nowhere.
    """

    def __init__(
        self, make: Maker, spread: ExpertExchange | None, choices: list[Tensor] | None
    ) -> None:
        self._make, self._spread, self._choices = make, spread, choices
        self.step = StepIds()
        if spread is not None:
            # the exchange outlives a model that is loaded anew
            spread.forget_layers()

    def beside_dense(self, at: str, m: DenseAndExperts) -> FeedForward:
        """Build a mixture and the dense part next to it, whose leaves' names begin with `at`."""
        make = self._make
        return DenseAndMixture(  # evaluated in this order, which is the order of the leaves
            make.ops,
            dense_pre=make.norm(at + "dense_pre", m.norm),
            dense=make_dense(make, at + "dense.", m.dense),
            dense_post=make.norm(at + "dense_post", m.norm),
            router_norm=make.norm(at + "router_norm", m.norm),
            experts_pre=make.norm(at + "experts_pre", m.norm),
            mixture=self._routed(at, m.experts),
            experts_post=make.norm(at + "experts_post", m.norm),
        )

    def _routed(self, at: str, m: Moe) -> MixtureOfExperts:
        router: Router | SoftplusRouter | RecordedRouter
        if m.score == "sqrt_softplus":
            router = _softplus_router(self._make, at, m, self.step)
        else:
            router = _router(self._make, at, m, m.score)
        if self._choices is not None:
            router = RecordedRouter(router, self._choices)
        return MixtureOfExperts(router, self._experts_of_width(at, m))

    def _experts_of_width(self, at: str, m: Moe) -> ChosenExperts:
        if m.latent is None:
            return self._chosen_experts(at, m)
        make = self._make
        return NarrowExperts(  # evaluated in this order, which is the order of the leaves
            make.ops,
            before=make.linear(at + "latent_in", at + "latent_in"),
            experts=self._chosen_experts(at, m),
            after=make.linear(at + "latent_out", at + "latent_out"),
        )

    def mixture(self, at: str, m: Moe) -> FeedForward:
        """Build the part whose leaves' names begin with `at`, in their order."""
        make = self._make
        routed = self._routed(at, m)
        if m.shared is None:
            return routed
        shared: FeedForward = make_dense(make, at + "shared.", m.shared)
        if m.shared_gate:
            gate = make.linear(at + "shared_gate", at + "shared_gate", role="router")
            shared = GatedFeedForward(make.ops, shared, gate)
        return WithSharedExpert(make.ops, routed, shared)

    def _chosen_experts(self, at: str, m: Moe) -> ChosenExperts:
        args = MoeArgs(m.act, m.gated, m.clamp, m.weighs_input, m.bound)
        if self._spread is not None:
            return self._spread_experts(at, m, args, self._spread)
        if self._make.group is not None:
            return self._share_of_experts(at, m, args, self._make.group)
        every = [f"{at}experts.{e}." for e in range(m.experts)]
        packed = _experts(self._make, at + "experts", m, every, is_adaptable=True)
        return partial(self._make.ops.moe, experts=packed, args=args)

    def _share_of_experts(
        self, at: str, m: Moe, args: MoeArgs, group: WorkerGroup
    ) -> SharedExperts:
        """Load only this worker's experts of a mixture."""
        shares = shares_of_experts(m.experts, group.size)
        own = shares[group.rank]
        self._skip_experts(at, m, own)
        experts = [f"{at}experts.{e}." for e in own]
        make = self._make
        if make.adapters is not None:
            others = (e for e in range(m.experts) if e not in own)
            parts = (*inputs_of(m), "down")
            make.adapters.add_elsewhere(f"{at}experts.{e}.{part}" for e in others for part in parts)
        packed = _experts(make, at + "experts", m, experts, is_adaptable=True)
        plain = replace(args, weighs_input=False)
        share = OwnShare(make.ops, packed, own.start, plain, make.adapters)
        return SharedExperts(group, _owners(shares, group, make), share, args, make.adapters)

    def _skip_experts(self, at: str, m: Moe, own: range) -> None:
        for e in range(m.experts):
            if e not in own:
                parts = ("gate", "up", "down")
                self._make.weights.skip([f"{at}experts.{e}.{part}" for part in parts])

    def _spread_experts(
        self, at: str, m: Moe, args: MoeArgs, spread: ExpertExchange
    ) -> DistributedExperts | SharedExperts:
        """Load only this worker's experts of a mixture."""
        make = self._make
        self._skip_experts(at, m, spread.experts)
        here = tuple(
            _experts(make, f"{at}experts.{e}", m, [f"{at}experts.{e}."], is_adaptable=False)
            for e in spread.experts
        )
        # rows are weighed before they are sent
        spread.add_layer(LocalExperts(make.ops, here, replace(args, weighs_input=False)))
        group = make.group
        if group is None:
            return DistributedExperts(m.experts, spread, args)
        reached = [e for share in spread.reached for e in share]
        places = torch.zeros(m.experts, dtype=torch.int64, device=make.device)
        places[reached] = torch.arange(len(reached), device=make.device)
        share = SpreadShare(spread, places, len(reached))
        return SharedExperts(group, _owners(spread.shares, group, make), share, args)


def _owners(shares: list[range], group: WorkerGroup, make: Maker) -> Tensor:
    """The worker of the group for each expert, where workers of all cores have these shares."""
    owners = [rank % group.size for rank, share in enumerate(shares) for _ in share]
    return torch.tensor(owners, device=make.device)


def _router_logits(make: Maker, at: str, m: Moe) -> Projection:
    assert not (m.wide_router and m.router_bias), "sums without a bias"
    weight = make.linear(
        at + "router", at + "router", role="router", is_adaptable=not m.wide_router
    )
    ops = make.ops
    if m.wide_router:  # as they are summed, in fp32
        return lambda h: ops.linear_partial(h, weight)
    return partial(ops.linear, w=weight)


def _softplus_router(make: Maker, at: str, m: Moe, step: StepIds) -> SoftplusRouter:
    others = m.renorm_min, m.groups, m.top_groups, m.group_best
    assert m.renorm and others == (0.0, 1, 1, 2), "nothing else of the choice"
    assert not m.expert_scales, "nothing else of the choice"
    logits, table = _router_logits(make, at, m), None
    if m.by_id:
        # float32 holds the numbers of experts exactly; leaves have no integer types
        table = make.tensor(
            at + "table", torch.float32, partial(_expert_table, at=at, count=m.experts)
        )
    bias = make.tensor(at + "select_bias", torch.float32) if m.select_bias else None
    return SoftplusRouter(make.ops, logits, m.top_k, m.scale, bias, table, step)


def _expert_table(values: Tensor, at: str, count: int) -> Tensor:
    """A table [V, k] of experts as whole numbers. Raises LoadError for one that does not exist."""
    table = values.to(torch.int32)
    if len(table) and not 0 <= int(table.min()) <= int(table.max()) < count:
        raise LoadError(f"{at}table names experts that are not among the {count} of the layer.")
    return table


def _router(make: Maker, at: str, m: Moe, score: RouterScore) -> Router:
    return Router(
        make.ops,
        _router_logits(make, at, m),
        RouteArgs(
            top_k=m.top_k,
            score=score,
            renorm=m.renorm,
            scale=m.scale,
            groups=m.groups,
            top_groups=m.top_groups,
            group_best=m.group_best,
            renorm_eps=m.renorm_eps,
            renorm_min=m.renorm_min,
            jitter=m.jitter,
        ),
        make.tensor(at + "select_bias", torch.float32) if m.select_bias else None,
        make.tensor(at + "expert_scales", torch.float32) if m.expert_scales else None,
    )


def _experts(
    make: Maker, name: str, m: Moe, experts: list[str], *, is_adaptable: bool
) -> ExpertWeights:
    def weights(*projections: str) -> Tensor | list[RowStack] | list[CodedWeight]:
        read = make.weights.stacked_rows if make.takes_rows else make.weights.stacked
        return read([[at + p + ".weight" for p in projections] for at in experts])

    def biases(*projections: str) -> Tensor | None:
        if not m.bias:
            return None
        found = make.weights.stacked([[at + p + ".bias" for p in projections] for at in experts])
        assert isinstance(found, Tensor), "biases are not stored in codes"
        return found

    segments = 1

    def pack() -> ExpertWeights:
        nonlocal segments
        up, down = weights(*inputs_of(m)), weights("down")
        stored_as = make.format_of_experts(down[0], leaves)
        scaled = down[0].group if isinstance(down[0], CodedWeight) else 0
        segments = make.segments(m.width, m.width, stored_as, scaled, is_cut=False)
        packed: ExpertWeights = make.ops.pack_experts(
            up,
            down,
            biases(*inputs_of(m)),
            biases("down"),
            stored_as,
            segments,
            m.gated,
        )
        return packed

    leaves = [at + projection for at in experts for projection in (*inputs_of(m), "down")]
    [dim] = make.weights.rows(experts[0] + "down")
    if is_adaptable and make.has_adapters:  # whose banks follow the segments
        with make.replacing(name, leaves):
            packed = pack()
    else:
        packed = make.packed(name, leaves, pack)
    make.keep(name, packed)
    if not is_adaptable:
        return packed
    return make.adaptable_experts(packed, experts, inputs_of(m), (dim, m.width), segments)
