"""The parameters that a spec has: canonical name, shape and role of each, in the order in which the
decoder loads them.

Canonical names are the unfused leaves (`layers.3.attn.q.weight`); what is fused (q, k and v; gate
and up) and how a leaf is cut over tensor-parallel ranks follows from its role and is decided by
loader and decoder, never by a family. Free of torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from quire.models.drafting.spec import DraftDecoder
from quire.models.mixers.compressed.spec import (
    CompressedAttention,
    Compression,
    Entries,
    RecentTokens,
)
from quire.models.mixers.recurrent.leaves import leaves
from quire.models.pooling.spec import HeadLayer, PoolerSpec
from quire.models.positions import (
    BucketBias,
    DisentangledScores,
    DistanceScores,
    LearnedTemperature,
)
from quire.models.spec import (
    Attention,
    AttentionOverEmbedding,
    Block,
    BlockAttention,
    Decoder,
    DenseAndExperts,
    FeedForward,
    HyperStreams,
    Indexer,
    LatentAttention,
    LayerInputs,
    MixerAfterShared,
    Mlp,
    Moe,
    Norm,
    SharedTransformer,
    SingleMixer,
    Streams,
    learned_rope,
    shared_distances,
    shared_transformers,
    single_mixers,
)

Role = Literal["column", "kv", "row", "vocab", "replicated"]
Kind = Literal[
    "matrix",
    "bias",
    "norm",
    "norm1p",
    "embedding",
    "position",
    "sink",
    "xielu",
    "decay",
    "mixing",
    "numbers",
]

XIELU_PARTS = ("alpha_p", "alpha_n", "beta", "eps")
"""The numbers of an xIELU activation, in the order in which the op takes them."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One leaf tensor. `role` determines the axis that is split over ranks (column: axis 0; kv: the
    same between heads of keys and values, where several ranks have the same one if there are fewer;
    row: axis 1; vocab: axis 0 padded); `kind` is the kind of tensor; `heads` is how many heads the
    first axis consists of, 1 where it has none; stored values are multiplied with `scale`.
    `sections` are runs of the first axis that are split each by itself, between units, of which
    several ranks have the same one if there are fewer: (rows, units) of each; (): there is one run.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    kind: Kind
    heads: int = 1
    scale: float = 1.0
    sections: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_linear(self) -> bool:
        """Whether it is a matrix of a linear module: kernels of convolutions have three axes."""
        return self.name == "head.weight" or (self.kind == "matrix" and len(self.shape) == 2)


def parameters(decoder: Decoder) -> dict[str, Parameter]:
    """Every leaf of the decoder by canonical name, in load order. A tied head is not a leaf."""
    return {p.name: p for p in _leaves(decoder)}


def layer_parameters(decoder: Decoder, layer: int) -> dict[str, Parameter]:
    """The leaves of one layer by canonical name."""
    return {p.name: p for p in _block(f"layers.{layer}.", decoder.blocks[layer], decoder)}


def outer_parameters(decoder: Decoder) -> dict[str, Parameter]:
    """The leaves that belong to no layer by canonical name."""
    return {p.name: p for p in (*_before_layers(decoder), *_after_layers(decoder))}


def num_parameters(decoder: Decoder) -> int:
    """Number of values of the weights; a tied embedding counts once."""
    return sum(p.size for p in outer_parameters(decoder).values()) + _num_in_layers(decoder, "")


def num_expert_parameters(decoder: Decoder) -> int:
    """Number of values of the experts' weights."""
    return _num_in_layers(decoder, ".experts.")


def num_repeated_parameters(decoder: Decoder) -> int:
    """Number of values by which a token is multiplied beyond those of the weights: those of
    repeated layers, and those of shared transformers for each of their uses but the first.
    """
    blocks = decoder.blocks
    again = Counter(blocks[b.repeats] for b in blocks if b.repeats is not None)
    repeated = sum(count * _num_in_block(block, decoder) for block, count in again.items())
    mixers = (block.mixer for block in decoder.blocks)
    uses = Counter(m.shared.number for m in mixers if isinstance(m, MixerAfterShared))
    sizes = {
        number: sum(leaf.size for leaf in _shared_transformer("", use, decoder.dim))
        for number, use in shared_transformers(decoder).items()
    }
    return repeated + sum((count - 1) * sizes[number] for number, count in uses.items())


def adapter_size(decoder: Decoder) -> int:
    """Values of one rank of an adapter of all matrices, embedding and shared head."""
    counts = Counter(decoder.blocks)
    layers = sum(
        count * sum(leaf.shape)
        for block, count in counts.items()
        for leaf in _block("", block, decoder)
        if leaf.kind == "matrix"
    )
    outer = outer_parameters(decoder).values()
    matrices = [leaf for leaf in outer if leaf.kind in ("matrix", "embedding")]
    tied = decoder.vocab + decoder.dim if decoder.tie else 0
    return layers + sum(sum(leaf.shape) for leaf in matrices) + tied


def _num_in_layers(d: Decoder, part: str) -> int:
    """Number of values of those leaves of layers whose names contain `part`. Equal layers are
    looked at once: mixtures have tens of thousands of leaves.
    """
    counts = Counter(d.blocks)
    return sum(count * _num_in_block(block, d, part) for block, count in counts.items())


def _num_in_block(block: Block, d: Decoder, part: str = "") -> int:
    return sum(leaf.size for leaf in _block("", block, d) if part in leaf.name)


def _leaves(d: Decoder) -> Iterator[Parameter]:
    yield from _before_layers(d)
    for i, block in enumerate(d.blocks):
        of_block = _block(f"layers.{d.first_layer + i}.", block, d)
        yield from (scaled(leaf, d.leaf_scales) for leaf in of_block)
    yield from _after_layers(d)


def _before_layers(d: Decoder) -> Iterator[Parameter]:
    if isinstance(d, DraftDecoder):
        yield from _draft_inputs(d)
        return
    width = d.table_width
    if d.has_table:
        yield Parameter("embed.weight", (d.vocab, width), "vocab", "embedding")
    if d.learned_positions:
        shape = (d.position_offset + d.learned_positions, width)
        yield Parameter("positions.weight", shape, "replicated", "position")
    if d.token_types:
        yield Parameter("types.weight", (d.token_types, width), "replicated", "position")
    if d.embed_norm is not None:
        yield from norm_leaves("embed_norm", d.embed_norm, width)
    if d.embed_width is not None:
        yield from linear_leaves("embed_proj", d.dim, width, "replicated", True)
    if d.layer_inputs is not None:
        yield from _layer_inputs(d.layer_inputs, d)
    if (rope := learned_rope(d)) is not None:
        yield Parameter("rope.factors", (rope.dim // 2,), "replicated", "mixing")
    if (shared := shared_distances(d)) is not None:
        yield from _distances("distances", *shared, d.dim)
    for use in shared_transformers(d).values():
        yield from _shared_transformer(f"shared.{use.number}.", use, d.dim)
    yield from _ways("enter", d)


def _after_layers(d: Decoder) -> Iterator[Parameter]:
    yield from _ways("leave", d)
    if d.final_norm is not None:
        yield from norm_leaves("norm", d.final_norm, d.dim)
    is_shared = d.tie if not isinstance(d, DraftDecoder) else not d.inputs.has_head
    if not is_shared and (d.generates or (d.pooler is not None and d.pooler.reads_tokens)):
        yield Parameter("head.weight", (d.vocab, d.dim), "vocab", "embedding")
    if d.pooler is not None:
        yield from _pooler(d.pooler, d.dim)
    if d.generates and d.head_bias:
        yield Parameter("head.bias", (d.vocab,), "vocab", "bias")


def _draft_inputs(d: DraftDecoder) -> Iterator[Parameter]:
    inputs = d.inputs
    if inputs.has_embedding:
        yield Parameter("embed.weight", (inputs.vocab, d.dim), "vocab", "embedding")
    if inputs.embed_norm is not None:
        yield from norm_leaves("draft.embed_norm", inputs.embed_norm, d.dim)
    width = inputs.states_width
    if inputs.join == "fc":
        if inputs.state_norm is not None:
            yield from norm_leaves("draft.state_norm", inputs.state_norm, width)
        width += d.dim
    if inputs.fc_norm is not None:
        yield from norm_leaves("draft.fc_norm", inputs.fc_norm, width)
    yield from linear_leaves("draft.fc", d.dim, width, "replicated", inputs.fc_bias)
    if inputs.join == "attention" and inputs.state_norm is not None:
        yield from norm_leaves("draft.state_norm", inputs.state_norm, d.dim)


def _pooler(p: PoolerSpec, dim: int) -> Iterator[Parameter]:
    yield from _head_layers("pooler.dense.", p.dense, dim * len(p.poolings))
    c, terms = p.classifier, p.terms
    if terms is not None:
        yield from _head_layers("pooler.layers.", terms.layers, dim)
        if terms.bias:
            yield Parameter("pooler.terms.bias", (terms.size,), "replicated", "bias")
    if c is not None:
        yield from _head_layers("pooler.layers.", c.layers, dim)
        if not c.token_ids:
            inputs = c.layers[-1].width if c.layers else dim
            yield from linear_leaves(
                "pooler.classifier", c.num_labels, inputs, "replicated", c.bias
            )


def _head_layers(at: str, layers: Sequence[HeadLayer], inputs: int) -> Iterator[Parameter]:
    for i, layer in enumerate(layers):
        yield from linear_leaves(f"{at}{i}", layer.width, inputs, "replicated", layer.bias)
        if layer.norm_eps is not None:
            norm = Norm("layer", layer.norm_eps, layer.norm_bias)
            yield from norm_leaves(f"{at}{i}.norm", norm, layer.width)
        inputs = layer.width


def _ways(side: str, d: Decoder) -> Iterator[Parameter]:
    """The projections on one side of the layers of a decoder with several streams."""
    if isinstance(d.streams, HyperStreams):
        if side == "leave":
            yield from _hyper("streams.leave.", d.streams.count, 1, d)
        return
    for i in range(1, 1 if d.streams is None else d.streams.count):
        yield from linear_leaves(f"streams.{side}.{i}", d.dim, d.dim, "replicated", False)


def scaled(leaf: Parameter, scales: Sequence[tuple[str, float]]) -> Parameter:
    """The leaf with the factor of the first of these ends that its name has."""
    for end, scale in scales:
        if leaf.name.endswith(end):
            return replace(leaf, scale=scale)
    return leaf


def _layer_inputs(inputs: LayerInputs, d: Decoder) -> Iterator[Parameter]:
    width = len(d.blocks) * inputs.width
    yield Parameter("inputs.embed.weight", (inputs.vocab, width), "vocab", "embedding")
    yield from linear_leaves("inputs.proj", width, d.dim, "replicated", False)
    yield from norm_leaves("inputs.norm", inputs.norm, inputs.width)


def _block(at: str, b: Block, d: Decoder) -> Iterator[Parameter]:
    dim = d.dim
    if b.repeats is not None:
        return
    yield from parts_of_block(at, b, dim)
    if b.input_act is not None:
        assert d.layer_inputs is not None, "layers read inputs that the decoder does not make"
        yield from linear_leaves(at + "inputs.gate", d.layer_inputs.width, dim, "replicated", False)
        yield from linear_leaves(at + "inputs.proj", dim, d.layer_inputs.width, "replicated", False)
        yield from norm_leaves(at + "inputs.post", b.norm, dim)
    if b.scaled:
        yield Parameter(at + "scale", (1,), "replicated", "norm")
    if isinstance(d.streams, HyperStreams):
        n = d.streams.count
        for part in ("attn", "mlp"):
            yield from _hyper(f"{at}streams.{part}.", 2 * n + n * n, 3, d)
    elif d.streams is not None:
        yield from _streams(at, d.streams, b.norm, dim)


def parts_of_block(at: str, b: Block, dim: int) -> Iterator[Parameter]:
    """The leaves of a layer's mixer and feed-forward part with their norms, in load order."""
    if b.mixer is not None:
        mixers = single_mixers(b.mixer)
        if isinstance(b.mixer, MixerAfterShared):
            yield from _use_of_shared(at + "shared.", b.mixer.shared, dim)
            mixers = (b.mixer.mixer,)
        if b.has_mixer_pre:
            yield from norm_leaves(at + "attn_pre", b.norm, dim)
        if isinstance(b.mixer, AttentionOverEmbedding):
            yield from norm_leaves(at + "embed_norm", b.mixer.norm, dim)
            yield from _attention(at + "attn.", b.mixer.attention, 2 * dim, dim)
            mixers = ()
        if isinstance(b.mixer, CompressedAttention):
            yield from _compressed_attention(at + "attn.", b.mixer, dim)
            mixers = ()
        for mixer in mixers:
            yield from _mixer(at, mixer, dim)
        if b.has_post:
            yield from norm_leaves(at + "attn_post", b.norm, dim)
    if b.mlp is not None:
        if b.has_mlp_pre:
            yield from norm_leaves(at + "mlp_pre", b.norm, dim)
        yield from _feed_forward(at + "mlp.", b.mlp, dim)
        if b.has_mlp_post:
            yield from norm_leaves(at + "mlp_post", b.norm, dim)


def _hyper(at: str, numbers: int, scales: int, d: Decoder) -> Iterator[Parameter]:
    assert d.streams is not None
    shape = (numbers, d.streams.count * d.dim)
    yield Parameter(at + "weight", shape, "replicated", "mixing")
    yield Parameter(at + "base", (numbers,), "replicated", "mixing")
    yield Parameter(at + "scale", (scales,), "replicated", "norm")


def _streams(at: str, s: Streams, norm: Norm, dim: int) -> Iterator[Parameter]:
    yield from linear_leaves(at + "low_rank.left", s.low_rank, dim, "replicated", False)
    yield from linear_leaves(at + "low_rank.right", dim, s.low_rank, "replicated", False)
    yield from norm_leaves(at + "low_rank.norm", norm, dim)
    yield Parameter(at + "streams.norm.weight", (dim,), "replicated", "norm", scale=1 / dim)
    yield from linear_leaves(at + "streams.router", s.count, dim, "replicated", False)
    yield from linear_leaves(at + "streams.predict", s.count**2, s.count, "replicated", False)
    yield from linear_leaves(at + "streams.correct", s.count, s.count, "replicated", False)
    yield Parameter(at + "streams.scale", (dim,), "replicated", "norm")


def _shared_transformer(at: str, s: SharedTransformer, dim: int) -> Iterator[Parameter]:
    """Parameters that its uses share."""
    yield from norm_leaves(at + "attn_pre", s.norm, 2 * dim)
    yield from _attention(at + "attn.", s.attention, 2 * dim, dim)
    yield from norm_leaves(at + "mlp_pre", s.norm, dim)
    yield from _mlp(at + "mlp.", s.mlp, dim)


def _use_of_shared(at: str, s: SharedTransformer, dim: int) -> Iterator[Parameter]:
    """Parameters of one layer: `_a` of an adapter makes the rank's numbers, `_b` its results."""
    a, rank = s.attention, s.attention_rank
    if rank:
        for part in "qkv":
            yield from linear_leaves(f"{at}{part}_a", rank, 2 * dim, "replicated", False)
        for part, heads in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)):
            yield from linear_leaves(f"{at}{part}_b", heads * a.head_dim, rank, "replicated", False)
    yield from linear_leaves(at + "mlp_a", s.rank, dim, "replicated", False)
    yield from linear_leaves(at + "mlp_b", 2 * s.mlp.width, s.rank, "replicated", False)
    yield from linear_leaves(at + "out", dim, dim, "replicated", False)


def _mixer(at: str, m: SingleMixer, dim: int) -> Iterator[Parameter]:
    if isinstance(m, Attention):
        yield from _attention(at + "attn.", m, dim)
    elif isinstance(m, LatentAttention):
        yield from _latent_attention(at + "attn.", m, dim)
    elif isinstance(m, BlockAttention):
        yield from _block_attention(at + "attn.", m, dim)
    else:
        assert not isinstance(m, RecentTokens | Entries), "parts of a whole"
        for leaf in leaves(m, dim):
            name = f"{at}mixer.{leaf.name}"
            yield Parameter(
                *(name, leaf.shape, leaf.role, leaf.kind, leaf.heads), sections=leaf.sections
            )


def _feed_forward(at: str, m: FeedForward, dim: int) -> Iterator[Parameter]:
    if isinstance(m, DenseAndExperts):
        yield from _dense_and_experts(at, m, dim)
    elif isinstance(m, Moe):
        yield from _moe(at, m, dim)
    else:
        yield from _mlp(at, m, dim)


def _attention(at: str, a: Attention, dim: int, outputs: int | None = None) -> Iterator[Parameter]:
    heads_of = {"q": a.heads, "k": a.kv_heads, "v": a.kv_heads}
    value_dim = a.head_dim if a.value_dim is None else a.value_dim
    for part in projections_of(a):
        heads, width = heads_of[part], value_dim if part == "v" else a.head_dim
        role: Role = "column" if part == "q" else "kv"
        yield from linear_leaves(at + part, heads * width, dim, role, a.qkv_bias, heads)
    if a.qk_norm is not None:
        for part in "q" if a.shares is not None else "qk":
            cut: Role = "column" if part == "q" else "kv"
            yield from _qk_norm(f"{at}{part}_norm", a, a.qk_norm, heads_of[part], cut)
    if a.gate != "none":
        width = a.heads if a.gate == "per_head" else a.heads * a.head_dim
        yield from linear_leaves(at + "gate", width, dim, "column", False, a.heads)
    yield from _products_of_positions(at, a, dim)
    yield from linear_leaves(at + "o", outputs or dim, a.heads * value_dim, "row", a.o_bias)
    if a.sinks:
        yield Parameter(at + "sinks", (a.heads,), "column", "sink")


def _distances(at: str, a: Attention, scores: DistanceScores, dim: int) -> Iterator[Parameter]:
    """The table of a whole decoder, or of a layer that has its own."""
    if isinstance(scores, BucketBias):
        yield Parameter(f"{at}.weight", (scores.buckets, a.heads), "replicated", "position")
        return
    yield Parameter(f"{at}.weight", (2 * scores.span, dim), "replicated", "position")
    if scores.eps is not None:
        yield from norm_leaves(f"{at}.norm", Norm("layer", scores.eps, bias=True), dim)


def _products_of_positions(at: str, a: Attention, dim: int) -> Iterator[Parameter]:
    scores, width = a.distances, a.heads * a.head_dim
    if isinstance(scores, BucketBias) and not scores.is_shared:
        yield from _distances(at + "distances", a, scores, dim)
    if not isinstance(scores, DisentangledScores) or scores.shares_products:
        return
    if scores.has_keys:
        yield from linear_leaves(at + "position_k", width, dim, "column", True, a.heads)
    if scores.has_queries:
        yield from linear_leaves(at + "position_q", width, dim, "column", True, a.heads)


def projections_of(a: Attention) -> str:
    """The projections of an attention's input: queries, keys and values that are its own."""
    if a.shares is not None:
        return "q"
    return "qk" if a.values_are_keys else "qkv"


def _qk_norm(at: str, a: Attention, n: Norm, heads: int, role: Role) -> Iterator[Parameter]:
    if a.qk_norm_over == "full":
        return norm_leaves(at, n, heads * a.head_dim, role=role, heads=heads)
    if a.qk_norm_over == "head":
        return norm_leaves(at, n, a.head_dim)
    if a.qk_norm_over == "heads_apart":
        of_heads = (norm_leaves(f"{at}.{head}", n, a.head_dim) for head in range(heads))
        return chain.from_iterable(of_heads)
    return norm_leaves(at, n, heads, a.head_dim, role=role, heads=heads)


def _latent_attention(at: str, a: LatentAttention, dim: int) -> Iterator[Parameter]:
    queries, is_own = a.heads * (a.unrotated + a.rotated), a.shares is None
    if a.q_rank is None:
        yield from linear_leaves(at + "q", queries, dim, "column", False)
    else:
        yield from linear_leaves(at + "q_a", a.q_rank, dim, "replicated", a.bias)
    if is_own:
        yield from linear_leaves(at + "kv_a", a.rank + a.rotated, dim, "replicated", a.bias)
    if a.q_rank is not None:
        yield from norm_leaves(at + "q_a_norm", a.norm, a.q_rank)
        yield from linear_leaves(at + "q_b", queries, a.q_rank, "column", False)
    if a.indexer is not None and a.chooses:
        yield from _indexer(at + "index.", a.indexer, a.q_rank, dim)
    if a.gate:
        yield from linear_leaves(at + "gate", a.heads, dim, "column", False, a.heads)
    if is_own:
        yield from norm_leaves(at + "kv_a_norm", a.norm, a.rank)
    yield from linear_leaves(
        at + "kv_b", a.heads * (a.unrotated + a.value_dim), a.rank, "column", False
    )
    if isinstance(a.temperature, LearnedTemperature):
        yield from _temperature(at + "temper.", a.heads)
    yield from linear_leaves(at + "o", dim, a.heads * a.value_dim, "row", a.o_bias)


def _indexer(at: str, indexer: Indexer, q_rank: int | None, dim: int) -> Iterator[Parameter]:
    if indexer.query_norm is not None:
        yield from norm_leaves(at + "q_norm", indexer.query_norm, dim)
        q_rank = dim
    assert q_rank is not None, "an indexer reads the latent of queries"
    yield from linear_leaves(at + "q", indexer.heads * indexer.dim, q_rank, "replicated", False)
    yield from linear_leaves(at + "k", indexer.dim, dim, "replicated", False)
    yield from linear_leaves(at + "weights", indexer.heads, dim, "replicated", False)
    yield from norm_leaves(at + "k_norm", indexer.norm, indexer.dim)
    if indexer.temperature is not None:
        yield from _temperature(at + "temper.", indexer.heads)


def _temperature(at: str, heads: int) -> Iterator[Parameter]:
    for part in ("scale", "bias"):
        yield Parameter(at + part, (heads,), "replicated", "mixing")


def _block_attention(at: str, a: BlockAttention, dim: int) -> Iterator[Parameter]:
    for part, heads in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)):
        yield from linear_leaves(at + part, heads * a.head_dim, dim, "replicated", False, heads)
    for part in "qk":
        yield from norm_leaves(f"{at}{part}_norm", a.norm, a.head_dim)
    for part, heads in (("q", a.indexer.heads), ("k", 1)):
        width = heads * a.indexer.dim
        yield from linear_leaves(f"{at}index.{part}", width, dim, "replicated", False)
    for part in "qk":
        yield from norm_leaves(f"{at}index.{part}_norm", a.norm, a.indexer.dim)
    yield from linear_leaves(at + "o", dim, a.heads * a.head_dim, "row", False)


def _compressed_attention(at: str, a: CompressedAttention, dim: int) -> Iterator[Parameter]:
    norm, c = Norm("rms_late_cast", a.eps), a.compression
    for name, rows in a.products:
        yield from linear_leaves(at + name, rows, dim, "replicated", False)
    yield from norm_leaves(at + "q_a_norm", norm, a.q_rank)
    yield from norm_leaves(at + "row_norm", norm, a.head_dim)
    yield from linear_leaves(at + "q_b", a.heads * a.head_dim, a.q_rank, "replicated", False)
    if c is not None:
        yield from _compressor(at + "entry.", c, norm, a.head_dim)
    if c is not None and c.indexer is not None:
        rows = c.indexer.heads * c.indexer.dim
        yield from linear_leaves(at + "index.q", rows, a.q_rank, "replicated", False)
        yield from _compressor(at + "index.", c, norm, c.indexer.dim)
    yield Parameter(at + "sinks", (a.heads,), "replicated", "sink")
    rank, width = a.groups * a.group_rank, a.heads * a.head_dim // a.groups
    yield from linear_leaves(at + "o_a", rank, width, "replicated", False)
    yield from linear_leaves(at + "o_b", dim, rank, "row", False)


def _compressor(at: str, c: Compression, norm: Norm, width: int) -> Iterator[Parameter]:
    yield Parameter(at + "bias", (c.rate, c.parts * width), "replicated", "mixing")
    yield from norm_leaves(at + "norm", norm, width)


def _mlp(at: str, m: Mlp, dim: int, *, is_cut: bool = True) -> Iterator[Parameter]:
    """`is_cut`: ranks have parts of its width; if not, each has all of it or nothing."""
    into: Role = "column" if is_cut else "replicated"
    back: Role = "row" if is_cut else "replicated"
    for part in ("gate", "up") if m.gated else ("up",):
        yield from linear_leaves(at + part, m.width, dim, into, m.bias)
    if m.act == "xielu":
        for part in XIELU_PARTS:
            yield Parameter(f"{at}xielu.{part}", (1,), "replicated", "xielu")
    yield from linear_leaves(at + "down", dim, m.width, back, m.bias or m.out_bias)


def _moe(at: str, m: Moe, dim: int) -> Iterator[Parameter]:
    yield from linear_leaves(at + "router", m.experts, dim, "replicated", m.router_bias)
    if m.by_id:
        yield Parameter(at + "table", (m.by_id, m.top_k), "replicated", "numbers")
    if m.select_bias:
        yield Parameter(at + "select_bias", (m.experts,), "replicated", "bias")
    if m.expert_scales:
        yield Parameter(at + "expert_scales", (m.experts,), "replicated", "norm")
    if m.latent is not None:
        yield from linear_leaves(at + "latent_in", m.latent, dim, "replicated", False)
    expert = Mlp(m.width, m.act, m.gated, m.bias)
    for e in range(m.experts):
        width = dim if m.latent is None else m.latent
        yield from _mlp(f"{at}experts.{e}.", expert, width, is_cut=False)
    if m.latent is not None:
        yield from linear_leaves(at + "latent_out", dim, m.latent, "replicated", False)
    if m.shared is not None:
        yield from _mlp(at + "shared.", m.shared, dim)
        if m.shared_gate:
            yield from linear_leaves(at + "shared_gate", 1, dim, "replicated", False)


def _dense_and_experts(at: str, m: DenseAndExperts, dim: int) -> Iterator[Parameter]:
    yield from norm_leaves(at + "dense_pre", m.norm, dim)
    yield from _mlp(at + "dense.", m.dense, dim)
    yield from norm_leaves(at + "dense_post", m.norm, dim)
    yield Parameter(at + "router_norm.weight", (dim,), "replicated", "norm", scale=m.router_scale)
    yield from norm_leaves(at + "experts_pre", m.norm, dim)
    yield from _moe(at, m.experts, dim)
    yield from norm_leaves(at + "experts_post", m.norm, dim)


def linear_leaves(
    at: str, outputs: int, inputs: int, role: Role, bias: bool, heads: int = 1
) -> Iterator[Parameter]:
    """Weight [outputs, inputs] and bias of a product."""
    yield Parameter(at + ".weight", (outputs, inputs), role, "matrix", heads)
    if bias:
        # the sum over ranks must add a row-parallel bias once, so it is not cut
        cut: Role = "replicated" if role == "row" else role
        yield Parameter(at + ".bias", (outputs,), cut, "bias", heads)


def norm_leaves(
    at: str, n: Norm, *shape: int, role: Role = "replicated", heads: int = 1
) -> Iterator[Parameter]:
    """Weight and bias of a norm, where its kind has them."""
    kind: Kind = "norm1p" if n.kind in ("rms1p", "layer1p") else "norm"
    if n.kind not in ("none", "rms_bare"):
        yield Parameter(at + ".weight", shape, role, kind, heads)
    if n.bias:
        yield Parameter(at + ".bias", shape, role, "bias", heads)
