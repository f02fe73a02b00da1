"""Makes the parts of a decoder from its spec and its weights, in load order. All branches on a spec
are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.worker_group import WorkerGroup
from quire.models.alibi import alibi_slopes
from quire.models.heads import LanguageModelHead
from quire.models.latent import LatentAttentionLayer, QueryLatent
from quire.models.layers import (
    AttentionLayer,
    DenseFeedForward,
    Embedding,
    FeedForward,
    Layer,
    Mixer,
    Projection,
    SharedProjection,
    XieluFeedForward,
    make_entrance,
    make_join,
    make_look_up,
    make_parallel_join,
    make_temper,
)
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.mixture_layers import (
    ChosenExperts,
    DistributedExperts,
    GatedFeedForward,
    LocalExperts,
    MixtureOfExperts,
    RecordedRouter,
    Router,
    WithSharedExpert,
    make_wide_logits,
)
from quire.models.parameters import XIELU_PARTS
from quire.models.rotary_tables import query_factors, rotary_table
from quire.models.sharding import num_segments
from quire.models.spec import (
    Alibi,
    Attention,
    Block,
    Decoder,
    LatentAttention,
    Mlp,
    Moe,
    Norm,
    Rope,
    Temperature,
)
from quire.ops import (
    AttentionArgs,
    CodedWeight,
    ExpertWeights,
    HeadsWeight,
    LinearWeight,
    MoeArgs,
    NormWeight,
    Ops,
    QKNorm,
    RotaryTable,
    RouteArgs,
)
from quire.ops.linear import PlainLinear
from quire.ops.mixers.latent import PlainHeads
from quire.ops.moe import SeparateExperts
from quire.ops.quantized import WeightFormat
from quire.quantization import Recipe, Role

Part = Tensor | LinearWeight | HeadsWeight | ExpertWeights


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A block's parts before the part that follows is known."""

    attn_pre: NormWeight | None
    mix: Mixer
    attn_post: NormWeight | None
    mlp_pre: NormWeight | None
    feed: FeedForward
    mlp_post: NormWeight | None
    block: Block


class Assembly:
    """Builds each part once; `parts` lists, by name, each part that holds memory, once."""

    def __init__(
        self,
        spec: Decoder,
        weights: WeightBuilder,
        ops: Ops,
        max_model_len: int,
        recipe: Recipe,
        spread: ExpertExchange | None,
        group: WorkerGroup | None,
        choices: list[Tensor] | None,
    ) -> None:
        """`choices`: where routers append the experts that they choose; None: nowhere."""
        self.parts: list[tuple[str, Part]] = []
        self._spec, self._weights, self._ops, self._recipe = spec, weights, ops, recipe
        self._max_model_len = max_model_len
        self._spread = spread
        self._group = group
        self._choices = choices
        if spread is not None:
            spread.forget_layers()
        self._tables: dict[Rope, RotaryTable] = {}
        self._tied_head: LinearWeight | None = None

    def embedding(self) -> Embedding:
        """The embedding stage."""
        table = self._table()
        positions = self._positions()
        norm = self._spec.embed_norm
        finish = make_entrance(self._ops, None if norm is None else self._norm("embed_norm", norm))
        # Gemma's scale is a tensor of the model's dtype, so it is rounded; those that are numbers
        # in a config (Granite) are exact in every dtype in use
        scale = torch.tensor(self._spec.embed_scale, dtype=self._weights.dtype).item()
        return Embedding(self._ops, make_look_up(self._ops, table, scale), positions, finish)

    def layers(self) -> list[Layer]:
        """All layers and the final norm, which is part of the last one's end."""
        pieces = [self._pieces(f"layers.{i}.", b) for i, b in enumerate(self._spec.blocks)]
        following = [p.attn_pre for p in pieces[1:]]
        following.append(self._norm("norm", self._spec.final_norm))
        return [self._layer(p, after) for p, after in zip(pieces, following, strict=True)]

    def head(self) -> LanguageModelHead:
        """The language-model head, over the embedding's table where the spec ties them."""
        spec, weight = self._spec, self._tied_head
        if weight is None:
            weight = self._linear("head", "head", role="head")
        return LanguageModelHead(self._ops, weight, spec.logit_scale, spec.logit_softcap)

    def _pieces(self, at: str, b: Block) -> _Pieces:
        norm = b.norm
        return _Pieces(  # evaluated in this order, which is the order of the leaves
            attn_pre=self._norm(at + "attn_pre", norm) if b.pre else None,
            mix=self._mixer(at + "attn.", b),
            attn_post=self._norm(at + "attn_post", norm) if b.post else None,
            mlp_pre=self._norm(at + "mlp_pre", norm) if b.has_mlp_pre else None,
            feed=self._feed_forward(at + "mlp.", b.mlp),
            mlp_post=self._norm(at + "mlp_post", norm) if b.post else None,
            block=b,
        )

    def _layer(self, p: _Pieces, after: NormWeight | None) -> Layer:
        ops, scale = self._ops, p.block.residual_scale
        join_mixer = make_join if p.block.parallel == "no" else make_parallel_join
        return Layer(
            enter=make_entrance(ops, p.attn_pre),
            mix=p.mix,
            join_mixer=join_mixer(ops, p.attn_post, p.mlp_pre, scale),
            feed=p.feed,
            join_feed=make_join(ops, p.mlp_post, after, scale),
        )

    def _mixer(self, at: str, b: Block) -> Mixer:
        if isinstance(b.mixer, LatentAttention):
            return self._latent_attention(at, b.mixer)
        return self._attention(at, b.mixer)

    def _attention(self, at: str, a: Attention) -> Mixer:
        qkv = self._linear(at + "qkv", at + "q", at + "k", at + "v")
        qk_norm = self._qk_norm(at, a)
        gate = self._linear(at + "gate", at + "gate") if a.gate == "full" else None
        return AttentionLayer(
            ops=self._ops,
            qkv=qkv,
            qk_norm=qk_norm,
            gate=gate,
            out=self._row_linear(at + "o", a.heads),
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            rotary=None if a.rope is None else self._rotary(a.rope),
            clip=a.clip,
            args=AttentionArgs(
                scale=a.scale,
                softcap=a.softcap,
                window=a.window,
                sinks=self._tensor(at + "sinks") if a.sinks else None,
                alibi=None if a.alibi is None else self._slopes(a.alibi, a.heads),
            ),
            temper=make_temper(self._ops, self._temperatures(a.temperature)),
        )

    def _latent_attention(self, at: str, a: LatentAttention) -> Mixer:
        first = "q" if a.q_rank is None else "q_a"
        down = self._linear(at + "q_kv_a", at + first, at + "kv_a")
        query = None
        if a.q_rank is not None:
            norm, name = self._norm(at + "q_a_norm", a.norm), at + "q_b"
            query = QueryLatent(norm, self._linear(name, name))
        norm = self._norm(at + "kv_a_norm", a.norm)
        kv = self._weights.tensor(at + "kv_b.weight")
        kv = kv.view(a.heads, a.unrotated + a.value_dim, a.rank)
        return LatentAttentionLayer(
            ops=self._ops,
            down=down,
            query=query,
            norm=norm,
            absorb=self._heads(at + "absorb", kv[:, : a.unrotated].transpose(1, 2)),
            values=self._heads(at + "values", kv[:, a.unrotated :]),
            out=self._row_linear(at + "o", a.heads),
            heads=a.heads,
            unrotated=a.unrotated,
            rotary=None if a.rope is None else self._rotary(a.rope),
            scale=a.scale,
        )

    def _heads(self, name: str, weight: Tensor) -> HeadsWeight:
        """A weight [H, out, in], kept in the model's dtype under every recipe."""
        packed: HeadsWeight = self._ops.pack_heads(weight)
        self.parts.append((name, packed))
        return packed

    def _qk_norm(self, at: str, a: Attention) -> QKNorm | None:
        if a.qk_norm is None:
            return None
        if a.qk_norm.kind == "rms_bare":
            assert a.qk_norm_over == "head" and not a.qk_norm.bias, "a bare norm is of one head"
            ones = torch.ones(a.head_dim, dtype=self._weights.dtype, device=self._weights.device)
            q = k = NormWeight("rms", a.qk_norm.eps, ones)
        else:
            q, k = (self._norm(at + part, a.qk_norm) for part in ("q_norm", "k_norm"))
        return QKNorm(q, k, over=a.qk_norm_over, after_rope=a.qk_norm_after_rope)

    def _slopes(self, alibi: Alibi, heads: int) -> Tensor:
        """Of this worker's heads."""
        rank, size = (0, 1) if self._group is None else (self._group.rank, self._group.size)
        own = alibi_slopes(alibi, heads * size)[rank * heads : (rank + 1) * heads]
        return torch.tensor(own, dtype=torch.float32, device=self._weights.device)

    def _temperatures(self, t: Temperature | None) -> Tensor | None:
        if t is None:
            return None
        factors = query_factors(t, self._max_model_len)
        return factors.to(self._weights.device)

    def _rotary(self, rope: Rope) -> RotaryTable:
        if rope not in self._tables:
            self._tables[rope] = rotary_table(rope, self._max_model_len, self._weights.device)
        return self._tables[rope]

    def _feed_forward(self, at: str, m: Mlp | Moe) -> FeedForward:
        return self._mixture(at, m) if isinstance(m, Moe) else self._dense(at, m)

    def _dense(self, at: str, m: Mlp) -> FeedForward:
        up = self._linear(at + "up", *[at + part for part in _inputs(m)])
        if m.act != "xielu":
            down = self._row_linear(at + "down", m.width)
            return DenseFeedForward(self._ops, up, down, m.act, m.gated)
        numbers = self._weights.merged([f"{at}xielu.{part}" for part in XIELU_PARTS])
        self.parts.append((at + "xielu", numbers))
        return XieluFeedForward(self._ops, up, self._row_linear(at + "down", m.width), numbers)

    def _mixture(self, at: str, m: Moe) -> FeedForward:
        router: Router | RecordedRouter = self._router(at, m)
        if isinstance(router, Router) and self._choices is not None:
            router = RecordedRouter(router, self._choices)
        routed = MixtureOfExperts(router, self._chosen_experts(at, m))
        if m.shared is None:
            return routed
        shared: FeedForward = self._dense(at + "shared.", m.shared)
        if m.shared_gate:
            gate = self._linear(at + "shared_gate", at + "shared_gate", role="router")
            shared = GatedFeedForward(self._ops, shared, gate)
        return WithSharedExpert(self._ops, routed, shared)

    def _router(self, at: str, m: Moe) -> Router:
        assert not (m.wide_router and m.router_bias), "sums without a bias"
        weight = self._linear(at + "router", at + "router", role="router")
        logits = make_wide_logits(self._ops, weight) if m.wide_router else None
        return Router(
            self._ops,
            logits or partial(self._ops.linear, w=weight),
            RouteArgs(
                top_k=m.top_k,
                score=m.score,
                renorm=m.renorm,
                scale=m.scale,
                groups=m.groups,
                top_groups=m.top_groups,
                group_best=m.group_best,
                renorm_eps=m.renorm_eps,
                renorm_min=m.renorm_min,
                jitter=m.jitter,
            ),
            self._tensor(at + "select_bias", torch.float32) if m.select_bias else None,
        )

    def _chosen_experts(self, at: str, m: Moe) -> ChosenExperts:
        args = MoeArgs(m.act, m.gated, m.clamp, m.weighs_input)
        if self._spread is not None:
            return self._spread_experts(at, m, args, self._spread)
        packed = self._experts(at + "experts", m, [f"{at}experts.{e}." for e in range(m.experts)])
        return partial(self._ops.moe, experts=packed, args=args)

    def _spread_experts(
        self, at: str, m: Moe, args: MoeArgs, spread: ExpertExchange
    ) -> DistributedExperts:
        """Load only this core's experts of a mixture."""
        for e in range(m.experts):
            if e not in spread.experts:
                parts = ("gate", "up", "down")
                self._weights.skip([f"{at}experts.{e}.{part}" for part in parts])
        here = tuple(
            self._experts(f"{at}experts.{e}", m, [f"{at}experts.{e}."]) for e in spread.experts
        )
        spread.add_layer(LocalExperts(self._ops, here, replace(args, weighs_input=False)))
        return DistributedExperts(m.experts, spread, args)

    def _experts(self, name: str, m: Moe, experts: list[str]) -> ExpertWeights:
        up = self._stacked(experts, _inputs(m), ".weight")
        down = self._stacked(experts, ("down",), ".weight")
        stored_as = self._format("projection", down[0])
        packed = self._ops.pack_experts(
            up,
            down,
            self._stacked(experts, _inputs(m), ".bias") if m.bias else None,
            self._stacked(experts, ("down",), ".bias") if m.bias else None,
            stored_as,
            self._segments(m.width, m.width, down[0], stored_as),
        )
        self.parts.append((name, packed))
        return packed

    def _positions(self) -> Tensor | None:
        """The rows of the position table that positions from 0 on use."""
        if not self._spec.learned_positions:
            return None
        return self._tensor("positions.weight")[self._spec.position_offset :]

    def _norm(self, at: str, n: Norm) -> NormWeight:
        assert n.kind != "rms_bare", "only of queries and keys"
        weight = None if n.kind == "none" else self._tensor(at + ".weight")
        return NormWeight(n.kind, n.eps, weight, self._tensor(at + ".bias") if n.bias else None)

    def _tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._weights.tensor(name, dtype)
        self.parts.append((name, tensor))
        return tensor

    def _linear(self, name: str, *leaves: str, role: Role = "projection") -> LinearWeight:
        weight, bias = self._weights.linear(*leaves)
        packed = self._ops.pack_linear(weight, bias, self._format(role, weight))
        self.parts.append((name, packed))
        return packed

    def _row_linear(self, name: str, units: int) -> Projection:
        """A projection whose inputs workers may share, cut between `units` (heads, or the width),
        of which this worker has so many.
        """
        weight, bias = self._weights.linear(name)
        stored_as, group = self._format("projection", weight), self._group
        segments, peaks = self._segments(units, weight.shape[1], weight, stored_as), None
        if group is not None and stored_as is not None:
            peaks = group.all_gather(self._ops.row_peaks(weight)).amax(0)
        packed = self._ops.pack_linear(weight, bias, stored_as, segments, peaks)
        self.parts.append((name, packed))
        if group is None:
            return partial(self._ops.linear, w=packed)
        return SharedProjection(
            self._ops, group, packed, stored_as is not None and stored_as.rounds_rows
        )

    def _format(self, role: Role, weight: Tensor | CodedWeight) -> WeightFormat | None:
        """What the recipe makes of a weight; one in codes stays as it is."""
        return None if isinstance(weight, CodedWeight) else self._recipe.format_of(role)

    def _segments(
        self, units: int, inputs: int, weight: Tensor | CodedWeight, stored_as: WeightFormat | None
    ) -> int:
        """Of a worker's inputs."""
        workers = 1 if self._group is None else self._group.size
        group = 0 if stored_as is None else stored_as.group
        if isinstance(weight, CodedWeight):
            group = weight.group
        return num_segments(units * workers, inputs * workers, group) // workers

    def _table(self) -> Tensor | LinearWeight:
        """The embedding table: the head's weight if the spec ties them, unless it is rounded."""
        table = self._weights.tensor("embed.weight")
        if self._spec.tie:
            stored_as = self._recipe.format_of("head")
            self._tied_head = self._ops.pack_linear(table, None, stored_as)
            if stored_as is None:
                self.parts.append(("embed", self._tied_head))
                return self._tied_head
            self.parts.append(("head", self._tied_head))
        self.parts.append(("embed.weight", table))
        return table

    def _stacked(
        self, experts: list[str], projections: tuple[str, ...], leaf: str
    ) -> Tensor | list[CodedWeight]:
        return self._weights.stacked([[at + p + leaf for p in projections] for at in experts])


def _inputs(m: Mlp | Moe) -> tuple[str, ...]:
    """The projections of a feed-forward part's input."""
    return ("gate", "up") if m.gated else ("up",)


def tensors_of(name: str, part: Part) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a part; none if a provider keeps it in its own format."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, PlainHeads):
        yield name + ".weight", part.weight
    elif isinstance(part, PlainLinear):
        yield name + ".weight", part.weight
        if part.bias is not None:
            yield name + ".bias", part.bias
    elif isinstance(part, SeparateExperts):
        for which, weights in (("up", part.up), ("down", part.down)):
            for expert, weight in enumerate(weights):
                yield from tensors_of(f"{name}.{expert}.{which}", weight)


def tensors_within(part: object) -> Iterator[Tensor]:
    """Yield the tensors of a part, which may be in a provider's own format."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from tensors_within(item)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from tensors_within(getattr(part, field.name))
