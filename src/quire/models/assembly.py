"""Makes the parts of a decoder from its spec and its weights, in load order. All branches on a spec
are here and in the makers of mixers and feed-forward parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.worker_group import WorkerGroup
from quire.models.feed_forward.dense import make_dense
from quire.models.feed_forward.mixture import MixtureMaker
from quire.models.heads import LanguageModelHead
from quire.models.layers import (
    Embedding,
    Join,
    Layer,
    PlacedFeedForward,
    PlacedMixer,
    SubLayer,
    SumOfMixers,
    make_entrance,
    make_join,
    make_look_up,
    make_parallel_join,
)
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.maker import Maker, Part
from quire.models.mixers.attention import make_attention
from quire.models.mixers.latent import make_latent_attention
from quire.models.mixers.recurrent.assembly import make_recurrent
from quire.models.spec import (
    Attention,
    Block,
    Decoder,
    LatentAttention,
    Mixer,
    Mlp,
    Moe,
    SingleMixer,
    single_mixers,
)
from quire.ops import LinearWeight, NormWeight, Ops
from quire.quantization import Recipe

MakeJoin = Callable[[Ops, NormWeight | None, NormWeight | None, float], Join]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A mixer or a feed-forward part with its norms, before what follows it is known."""

    pre: NormWeight | None
    part: SubLayer
    post: NormWeight | None
    join: MakeJoin
    scale: float


class Assembly:
    """Builds each part once."""

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
        first_place: int,
    ) -> None:
        """`choices`: where routers append the experts that they choose; None: nowhere. first_place:
        where the memory of the first layer is among those of the pool.
        """
        self._spec, self._ops = spec, ops
        self._make = Maker(weights, ops, max_model_len, recipe, group)
        self._mixtures = MixtureMaker(self._make, spread, choices)
        self._place = first_place
        self._tied_head: LinearWeight | None = None

    @property
    def parts(self) -> list[tuple[str, Part]]:
        """By name, each part that holds memory, once."""
        return self._make.parts

    def embedding(self) -> Embedding:
        """The embedding stage."""
        table = self._table()
        positions = self._positions()
        norm = self._spec.embed_norm
        finish = make_entrance(
            self._ops, None if norm is None else self._make.norm("embed_norm", norm)
        )
        # Gemma's scale is a tensor of the model's dtype, so it is rounded; those that are numbers
        # in a config (Granite) are exact in every dtype in use
        scale = torch.tensor(self._spec.embed_scale, dtype=self._make.dtype).item()
        return Embedding(self._ops, make_look_up(self._ops, table, scale), positions, finish)

    def layers(self) -> list[Layer]:
        """All layers and the final norm, which is part of the last one's end."""
        layers = [list(self._pieces(f"layers.{i}.", b)) for i, b in enumerate(self._spec.blocks)]
        following = [piece.pre for pieces in layers for piece in pieces][1:]
        following.append(self._make.norm("norm", self._spec.final_norm))
        after = iter(following)
        return [
            Layer(
                enter=make_entrance(self._ops, pieces[0].pre),
                parts=tuple(
                    (p.part, p.join(self._ops, p.post, next(after), p.scale)) for p in pieces
                ),
            )
            for pieces in layers
        ]

    def head(self) -> LanguageModelHead:
        """The language-model head, over the embedding's table where the spec ties them."""
        spec, weight = self._spec, self._tied_head
        if weight is None:
            weight = self._make.linear("head", "head", role="head")
        return LanguageModelHead(self._ops, weight, spec.logit_scale, spec.logit_softcap)

    def _pieces(self, at: str, b: Block) -> Iterator[_Piece]:
        if b.mixer is not None:
            join = make_join if b.parallel == "no" else make_parallel_join
            yield self._piece(at + "attn", b, b.pre, partial(self._mixer, at, b.mixer), join)
        if b.mlp is not None:
            yield self._piece(at + "mlp", b, b.has_mlp_pre, partial(self._feed, at, b.mlp))

    def _piece(
        self,
        at: str,
        b: Block,
        has_pre: bool,
        make: Callable[[], SubLayer],
        join: MakeJoin = make_join,
    ) -> _Piece:
        return _Piece(  # evaluated in this order, which is the order of the leaves
            pre=self._make.norm(at + "_pre", b.norm) if has_pre else None,
            part=make(),
            post=self._make.norm(at + "_post", b.norm) if b.post else None,
            join=join,
            scale=b.residual_scale,
        )

    def _feed(self, at: str, m: Mlp | Moe) -> PlacedFeedForward:
        if isinstance(m, Moe):
            return PlacedFeedForward(self._mixtures.mixture(at + "mlp.", m))
        return PlacedFeedForward(make_dense(self._make, at + "mlp.", m))

    def _mixer(self, at: str, m: Mixer) -> SubLayer:
        placed = [self._placed(at, mixer) for mixer in single_mixers(m)]
        return placed[0] if len(placed) == 1 else SumOfMixers(self._ops, tuple(placed))

    def _placed(self, at: str, m: SingleMixer) -> PlacedMixer:
        """Build a mixer, whose memory is the next one of the pool."""
        place = self._place
        self._place += 1
        if isinstance(m, Attention):
            return PlacedMixer(make_attention(self._make, at + "attn.", m), place)
        if isinstance(m, LatentAttention):
            return PlacedMixer(make_latent_attention(self._make, at + "attn.", m), place)
        return PlacedMixer(make_recurrent(self._make, at + "mixer.", m), place)

    def _positions(self) -> Tensor | None:
        """The rows of the position table that positions from 0 on use."""
        if not self._spec.learned_positions:
            return None
        return self._make.tensor("positions.weight")[self._spec.position_offset :]

    def _table(self) -> Tensor | LinearWeight:
        """The embedding table: the head's weight if the spec ties them, unless it is rounded."""
        table = self._make.weights.tensor("embed.weight")
        if self._spec.tie:
            stored_as = self._make.format_of("head")
            self._tied_head = self._ops.pack_linear(table, None, stored_as)
            if stored_as is None:
                self._make.keep("embed", self._tied_head)
                return self._tied_head
            self._make.keep("head", self._tied_head)
        self._make.keep("embed.weight", table)
        return table
