"""Makes the parts of a decoder from its spec and its weights, in load order. All branches on a spec
are here and in the makers of mixers and feed-forward parts.

Makers of what few models have are imported where a spec asks for them: a start would wait for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from quire.models.adapters.banks import AdapterBanks
from quire.models.drafting.spec import DraftDecoder
from quire.models.feed_forward.dense import make_dense
from quire.models.heads import HeadPart, LanguageModelHead
from quire.models.layers import (
    AxisMixer,
    Embedding,
    Join,
    Layer,
    PlacedFeedForward,
    PlacedMixer,
    StageInput,
    SubLayer,
    SumOfMixers,
    make_entrance,
    make_input_join,
    make_join,
    make_look_up,
    make_normed_join,
    make_parallel_join,
    make_projected,
    make_scaled_join,
)
from quire.models.loading.model_parts import Part
from quire.models.loading.options import ModelOptions
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.loading.weight_placement import RunnableLayer, WhereMade
from quire.models.maker import Maker
from quire.models.mixers.attention import make_attention
from quire.models.mixers.compressed.spec import CompressedAttention, Entries, RecentTokens
from quire.models.spec import (
    Attention,
    AttentionOverEmbedding,
    Block,
    BlockAttention,
    Decoder,
    DenseAndExperts,
    FeedForward,
    HyperStreams,
    LatentAttention,
    Mixer,
    MixerAfterShared,
    Moe,
    SharedTransformer,
    SingleMixer,
    Streams,
    rope_of_axes,
    shared_distances,
    shared_transformers,
    single_mixers,
)
from quire.ops import LinearWeight, NormWeight, Ops

if TYPE_CHECKING:
    from quire.models.drafting.inputs import DraftStage
    from quire.models.feed_forward.mixture import MixtureMaker
    from quire.models.mixers.latent import ChosenTokens
    from quire.models.mixers.shared_transformer import SharedTransformerUse, SharedWeights
    from quire.models.pooling.pooler import Pooler
    from quire.models.streams import HyperLayer, NormedPart, StreamsLayer

T = TypeVar("T")
LookUp = Callable[[Tensor], Tensor]
"""ids [T] -> their embeddings [T, C]."""
MakeJoin = Callable[[Ops, NormWeight | None, NormWeight | None, float], Join]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A mixer or a feed-forward part with its norms, before what follows it is known."""

    pre: NormWeight | None
    part: SubLayer
    post: NormWeight | None
    join: MakeJoin
    scale: float


def _embeddings(ids: Tensor, x: Tensor) -> Tensor:
    """Input of layers with a shared transformer."""
    return x


def _join_of(b: Block) -> MakeJoin:
    return make_normed_join if b.norms_sum else make_join


def _normed(ops: Ops, piece: _Piece) -> NormedPart:
    from quire.models.streams import NormedPart

    assert piece.post is not None, "norms after all parts"
    return NormedPart(ops, piece.pre, piece.part, piece.post)


class Assembly:
    """Builds each part once."""

    def __init__(
        self,
        spec: Decoder,
        weights: WeightBuilder,
        ops: Ops,
        max_model_len: int,
        options: ModelOptions,
        *,
        choices: list[Tensor] | None,
        adapters: AdapterBanks | None,
    ) -> None:
        """`choices`: where routers append the experts that they choose; None: nowhere. `adapters`
        gets the banks of adapters; None: there are none.
        """
        self._make = Maker(
            *(weights, ops, max_model_len, options.recipe, options.group, adapters),
            stored=options.stored,
            note_part=options.note_part,
            memory=options.memory,
        )
        self._spec, self._ops = spec, self._make.ops
        self._spread, self._choices = options.spread, choices
        self._mixtures: MixtureMaker | None = None
        self._place = options.first_layer
        self._placement = (options.make_placement or WhereMade)()
        self._first_places: list[int] = []
        self._tied_head: LinearWeight | None = None
        self._head_rows: Tensor | None = None
        self._shared: dict[int, SharedWeights] = {}
        self._distances: Tensor | None = None
        self._choice: ChosenTokens | None = None

    @property
    def parts(self) -> list[tuple[str, Part]]:
        return self._make.parts

    @property
    def leaves_of(self) -> dict[str, tuple[str, ...]]:
        """Leaves by the part that is their rows, one above the other, as they are."""
        return self._make.leaves_of

    def embedding(self, target: LookUp | None) -> Embedding | DraftStage | StageInput:
        """The first stage; a draft network without a table looks tokens up in the `target`'s."""
        if not self._spec.embeds:
            return self._stage_input()
        if isinstance(self._spec, DraftDecoder):
            own = self._table() if self._spec.inputs.has_embedding else None
            look_up = target if own is None else make_look_up(self._ops, own, 1.0)
            assert look_up is not None, "a draft network without a target"
            from quire.models.drafting.inputs import make_draft_stage

            return make_draft_stage(self._make, self._spec, look_up)
        table = self._table()
        positions = self._positions()
        types = self._make.tensor("types.weight") if self._spec.token_types else None
        norm = self._spec.embed_norm
        finish = make_entrance(
            self._ops, None if norm is None else self._make.norm("embed_norm", norm)
        )
        # ALBERT and its like: the table is narrower than the layers
        if self._spec.embed_width is not None:
            projection = self._make.linear("embed_proj", "embed_proj")
            finish = make_projected(self._ops, finish, projection)
        table = self._make.adaptable("embed", table, is_table=True)
        look_up, inputs = make_look_up(self._ops, table, self._embed_scale), self._spec.layer_inputs
        stage: Callable[[Tensor, Tensor], Tensor] | None = None
        if inputs is not None:
            from quire.models.feed_forward.layer_inputs import make_layer_inputs

            stage = make_layer_inputs(self._make, self._spec, inputs)
        self._make_distances()
        for number, use in shared_transformers(self._spec).items():
            from quire.models.mixers.shared_transformer import make_shared_weights

            self._shared[number] = make_shared_weights(self._make, use)
        if self._shared:
            assert stage is None and norm is None and positions is None, "embeddings as they are"
            stage = _embeddings
        if (streams := self._spec.streams) is not None:
            from quire.models.streams import make_entry, make_hyper_entry

            assert norm is None, "streams are entered from the embedding"
            if isinstance(streams, HyperStreams):
                finish = make_hyper_entry(self._make, streams)
            else:
                finish = make_entry(self._make, streams)
        return Embedding(self._ops, look_up, positions, types, finish, stage)

    def _stage_input(self) -> StageInput:
        """The first part of a later stage, which has no ids; but a tied head is cut from the
        embedding's leaf, and a network that drafts looks its tokens up there.
        """
        look_up = None
        if self._spec.has_table:
            table = self._table()
            if self._spec.lends_table:
                look_up = make_look_up(self._ops, table, self._embed_scale)
        self._make_distances()
        return StageInput(look_up)

    def _make_distances(self) -> None:
        if (distances := shared_distances(self._spec)) is not None:
            from quire.models.mixers.relative_scores import make_shared_table

            self._distances = make_shared_table(self._make, distances[1])

    @property
    def _embed_scale(self) -> float:
        # Gemma's scale is a tensor of the model's dtype, so it is rounded; those that are numbers
        # in a config (Granite) are exact in every dtype in use
        scale: float = torch.tensor(self._spec.embed_scale, dtype=self._make.dtype).item()
        return scale

    def axes(self) -> AxisMixer | None:
        """The maker of a step's rotary table; None where positions have one axis."""
        rope = rope_of_axes(self._spec)
        table = self._make.rotary(rope)
        if rope is None or table is None:
            return None
        axes = torch.tensor(rope.axes, dtype=torch.int64, device=self._make.device)
        return AxisMixer(self._ops, table, axes)

    def layers(self) -> Sequence[RunnableLayer]:
        streams = self._spec.streams
        layers: Sequence[RunnableLayer]
        if isinstance(streams, HyperStreams):
            layers = list(self._hyper_layers(streams))
        elif streams is not None:
            layers = list(self._layers_of_streams(streams))
        else:
            layers = self._layers()
        return self._placement.finish(layers)

    def _placed_layers(self, build: Callable[[int, Block], T]) -> list[T]:
        """Build each layer, whose weights are placed before those of the next are made."""
        built = []
        for i, block in enumerate(self._spec.blocks):
            first = len(self.parts)
            if block.repeats is None:
                built.append(build(i, block))
            else:
                of_first = self._spec.blocks[block.repeats]
                assert replace(block, repeats=None) == of_first, "another layer"
                assert not any(of_first.memories), "a layer remembers one pass"
                built.append(built[block.repeats])
            # one layer at a time, so that a placement that moves weights away never holds two in
            # memory
            self._placement.place(i, self.parts[first:])
        return built

    def _layers_of_streams(self, s: Streams) -> Iterator[StreamsLayer]:
        from quire.models.streams import make_exit

        built = self._placed_layers(lambda i, block: self._layer_of_streams(i, block, s))
        yield from built[:-1]
        yield replace(built[-1], leave=make_exit(self._make, self._spec, s))

    def _hyper_layers(self, s: HyperStreams) -> Iterator[HyperLayer]:
        from quire.models.streams import make_hyper_exit

        built = self._placed_layers(lambda i, block: self._hyper_layer(i, block, s))
        yield from built[:-1]
        yield replace(built[-1], leave=make_hyper_exit(self._make, self._spec, s))

    def _hyper_layer(self, layer: int, block: Block, s: HyperStreams) -> HyperLayer:
        from quire.models.streams import make_hyper_layer

        assert block.parallel == "no" and block.residual_scale == 1.0, "sums without factors"
        parts: list[tuple[str, NormWeight, SubLayer]] = []
        for name, piece in zip(("attn", "mlp"), self._layer(layer, block), strict=True):
            assert piece.pre is not None and piece.post is None, "norms before the parts alone"
            parts.append((name, piece.pre, piece.part))
        at = f"layers.{self._spec.first_layer + layer}."
        return make_hyper_layer(self._make, at, s, parts, leave=lambda x: x)

    def _layer_of_streams(self, layer: int, block: Block, s: Streams) -> StreamsLayer:
        from quire.models.streams import make_streams_layer

        pieces = list(self._layer(layer, block))
        assert len(pieces) == 3 and block.parallel == "no", "mixer, feed-forward part and input"
        assert block.residual_scale == 1.0 and not block.scaled, "sums without factors"
        mix, feed, inputs = (_normed(self._ops, piece) for piece in pieces)
        at = f"layers.{layer}."
        return make_streams_layer(
            self._make, at, s, block.norm, (mix, feed, inputs), leave=lambda x: x
        )

    def _layers(self) -> list[Layer]:
        layers = self._placed_layers(lambda i, block: list(self._layer(i, block)))
        # the norm before a part runs in one op with the sum after the part before it, so each part
        # gets the norm of its successor
        following = [piece.pre for pieces in layers for piece in pieces][1:]
        last = self._spec.final_norm
        following.append(None if last is None else self._make.norm("norm", last))
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

    def pooler(self) -> Pooler | None:
        if self._spec.pooler is None:
            return None
        from quire.models.pooling.pooler import make_pooler

        return make_pooler(self._make, self._spec.pooler, self._token_rows)

    def head(self) -> LanguageModelHead | None:
        """The language-model head, over the embedding's table where the spec ties them; None: a
        draft network uses its target's, and a model that only pools has none.
        """
        spec, weight = self._spec, self._tied_head
        if not spec.generates or (isinstance(spec, DraftDecoder) and not spec.inputs.has_head):
            return None
        if weight is None:
            if spec.pooler is None or not spec.pooler.reads_tokens:
                weight = self._make.linear("head", "head", role="head")
            else:
                self._head_rows, weight = self._make.linear_and_rows("head", role="head")
        else:
            weight = self._make.adaptable("head", weight, is_table=False)
        part = HeadPart.of(weight, self._make.group)
        return LanguageModelHead(self._ops, weight, spec.logit_scale, spec.logit_softcap, part)

    def _layer(self, layer: int, b: Block) -> Iterator[_Piece]:
        """The pieces of a layer. Its own factor, where it has one, belongs to the last."""
        at = f"layers.{self._spec.first_layer + layer}."
        # noted before the pieces: layers that share keys and values name a layer, whose mixer may
        # be its second piece
        self._first_places.append(self._place)
        *pieces, last = [*self._pieces(at, b), *self._input_gate(at, layer, b)]
        yield from pieces
        if b.scaled:
            factor = self._make.tensor(at + "scale")
            last = replace(last, join=partial(make_scaled_join, factor=factor))
        yield last

    def _input_gate(self, at: str, layer: int, b: Block) -> Iterator[_Piece]:
        if b.input_act is None:
            return
        from quire.models.feed_forward.layer_inputs import make_input_gate, make_input_norm

        assert self._spec.layer_inputs is not None
        at, width = at + "inputs.", self._spec.layer_inputs.width
        gate = make_input_gate(self._make, at, layer, width, b.input_act)
        post = make_input_norm(self._make, at, b.norm)
        yield _Piece(None, gate, post, make_join, b.residual_scale)

    def _pieces(self, at: str, b: Block) -> Iterator[_Piece]:
        mixer = b.mixer
        if isinstance(mixer, MixerAfterShared):
            use = self._use(at + "shared.", mixer.shared)
            yield _Piece(None, use, None, make_input_join, scale=1.0)
            mixer = mixer.mixer
        if mixer is not None:
            join = _join_of(b) if b.parallel == "no" else make_parallel_join
            mix = partial(self._mixer, at, mixer)
            yield self._piece(at + "attn", b, (b.has_mixer_pre, b.has_post), mix, join)
        if b.mlp is not None:
            feed = partial(self._feed, at, b.mlp)
            norms = b.has_mlp_pre, b.has_mlp_post
            yield self._piece(at + "mlp", b, norms, feed, _join_of(b))

    def _piece(
        self,
        at: str,
        b: Block,
        norms: tuple[bool, bool],
        make: Callable[[], SubLayer],
        join: MakeJoin,
    ) -> _Piece:
        has_pre, has_post = norms
        return _Piece(  # evaluated in this order, which is the order of the leaves
            pre=self._make.norm(at + "_pre", b.norm) if has_pre else None,
            part=make(),
            post=self._make.norm(at + "_post", b.norm) if has_post else None,
            join=join,
            scale=b.residual_scale,
        )

    def _feed(self, at: str, m: FeedForward) -> PlacedFeedForward:
        if isinstance(m, DenseAndExperts):
            return PlacedFeedForward(self._mixture_maker().beside_dense(at + "mlp.", m))
        if isinstance(m, Moe):
            mixtures = self._mixture_maker()
            reads = mixtures.step if m.by_id else None
            return PlacedFeedForward(mixtures.mixture(at + "mlp.", m), reads)
        return PlacedFeedForward(make_dense(self._make, at + "mlp.", m))

    def _mixture_maker(self) -> MixtureMaker:
        """One for all layers."""
        if self._mixtures is None:
            from quire.models.feed_forward.mixture import MixtureMaker

            self._mixtures = MixtureMaker(self._make, self._spread, self._choices)
        return self._mixtures

    def _use(self, at: str, s: SharedTransformer) -> SharedTransformerUse:
        from quire.models.mixers.shared_transformer import make_use

        place, self._place = self._place, self._place + 1
        return make_use(self._make, at, s, self._shared[s.number], place)

    def _mixer(self, at: str, m: Mixer) -> SubLayer:
        if isinstance(m, AttentionOverEmbedding):
            from quire.models.drafting.inputs import make_over_embedding

            norm = self._make.norm(at + "embed_norm", m.norm)
            return make_over_embedding(self._ops, norm, self._placed(at, m.attention))
        if isinstance(m, CompressedAttention):
            from quire.models.mixers.compressed.layers import make_compressed_attention

            place, self._place = self._place, self._place + len(m.mixers)
            return make_compressed_attention(self._make, at + "attn.", m, place)
        if isinstance(m, LatentAttention) and m.shares is not None:
            return self._over_latents(at + "attn.", m, m.shares)
        placed = [self._placed(at, mixer) for mixer in single_mixers(m)]
        return placed[0] if len(placed) == 1 else SumOfMixers(self._ops, tuple(placed))

    def _over_latents(self, at: str, m: LatentAttention, source: int) -> SubLayer:
        """Build a mixer over the latents of layer `source`."""
        from quire.models.mixers.latent import ChoiceBefore, make_indexer, make_shared_latents

        found = self._spec.blocks[source].mixer
        assert source < len(self._first_places) - 1, "not an earlier layer"
        assert isinstance(found, LatentAttention) and found.shares is None, "latents of its own"
        assert (found.rank, found.rotated) == (m.rank, m.rotated), "other latents"
        assert self._choice is not None, "the layer with the latents comes first"
        layer = make_shared_latents(self._make, at, m, self._choice)
        placed = PlacedMixer(layer, self._first_places[source])
        if m.indexer is None or not m.chooses:
            return placed
        place, self._place = self._place, self._place + 1
        indexer = make_indexer(self._make, at + "index.", m.indexer)
        return ChoiceBefore(indexer, place, self._choice, placed)

    def _placed(self, at: str, m: SingleMixer) -> PlacedMixer:
        place = self._place
        # layers without keys of their own read the memory of an earlier one and take no place in
        # the pool
        if isinstance(m, Attention) and m.shares is not None:
            assert m.shares < len(self._first_places) - 1, "not an earlier layer"
            assert self._spec.blocks[m.shares].memories == (m.memory,), "other keys and values"
            place = self._first_places[m.shares]
        else:
            self._place += 1
        if isinstance(m, Attention) and not m.is_causal:
            from quire.models.mixers.prompt_attention import make_prompt_attention

            mixer = make_prompt_attention(self._make, at + "attn.", m, self._distances)
            return PlacedMixer(mixer, place)
        if isinstance(m, Attention):
            return PlacedMixer(make_attention(self._make, at + "attn.", m), place)
        if isinstance(m, LatentAttention):
            from quire.models.mixers.latent import ChosenTokens, make_latent_attention

            self._choice = self._choice or ChosenTokens()  # one for all layers
            layer = make_latent_attention(self._make, at + "attn.", m, self._choice)
            return PlacedMixer(layer, place)
        if isinstance(m, BlockAttention):
            from quire.models.mixers.block_attention import make_block_attention

            return PlacedMixer(make_block_attention(self._make, at + "attn.", m), place)
        from quire.models.mixers.recurrent.assembly import make_recurrent

        assert not isinstance(m, RecentTokens | Entries), "parts of a whole"
        return PlacedMixer(make_recurrent(self._make, at + "mixer.", m), place)

    def _positions(self) -> Tensor | None:
        """The rows of the position table that positions from 0 on use."""
        if not self._spec.learned_positions:
            return None
        return self._make.tensor("positions.weight")[self._spec.position_offset :]

    def _token_rows(self) -> Tensor:
        """The language-model head [V, C] that a classifier takes rows of."""
        if not self._spec.tie and not self._spec.generates:
            return self._make.weights.tensor("head.weight")
        assert self._head_rows is not None, "the embedding and the head come first"
        return self._head_rows

    def _packed_table(self) -> LinearWeight:
        make = self._make
        [(weight, *_)] = make.weights.products(["embed"], takes_rows=make.takes_rows)
        packed: LinearWeight = self._ops.pack_linear(weight, None, None)
        return packed

    def _table(self) -> Tensor | LinearWeight:
        """The embedding table: the head's weight if the spec ties them, unless it is rounded."""
        make, pooler = self._make, self._spec.pooler
        needs_rows = pooler is not None and pooler.reads_tokens
        is_tied, stored_as = self._spec.tie and self._spec.generates, make.format_of("head", "head")
        # one copy in memory serves both: rows for the look-up are taken out of the packed form
        if is_tied and stored_as is None and not needs_rows:
            self._tied_head = make.packed("embed", ["embed"], self._packed_table)
            make.keep("embed", self._tied_head)
            make.note_rows("embed", ["embed"])
            return self._tied_head
        table = make.table()
        if needs_rows:
            self._head_rows = table
        if is_tied:
            # a rounded head keeps its own copy: look-ups take the values as they are stored
            name = "embed" if stored_as is None else "head"
            self._tied_head = make.written(name, ["embed"])
            if self._tied_head is None:
                with make.replacing(name, ["embed"]):
                    self._tied_head = self._ops.pack_linear(table, None, stored_as)
            if stored_as is None:
                self._make.keep("embed", self._tied_head)
                return self._tied_head
            self._make.keep("head", self._tied_head)
            if not needs_rows:
                make.note_rows("head", ["embed"])
        if self._spec.embeds or self._spec.lends_table:
            self._make.keep("embed.weight", table)
            if not needs_rows:
                make.note_rows("embed.weight", ["embed"])
        return table
