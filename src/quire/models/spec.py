"""Decoders as values: every architecture is one `Decoder` made of these dataclasses and
those of `models/positions.py` and `models/mixers/recurrent/spec.py`.

A spec holds facts that change the answers and nothing else; it is frozen, hashable, comparable and
printable. Memory plans, parameter lists and the model itself are functions of it. Families
(`models/families`) make specs from Hugging Face configs, `models/decoder.py` builds modules from
them. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.models.layer_memory import KeyValues, Latents, LayerMemory
from quire.models.mixers.compressed.spec import CompressedAttention, Entries, RecentTokens
from quire.models.mixers.recurrent.spec import RecurrentMixer
from quire.models.pooling.spec import PoolerSpec
from quire.models.positions import (
    Alibi,
    BucketBias,
    DistanceScores,
    LearnedTemperature,
    Rope,
    Temperature,
)

NormKind = Literal["rms", "rms_late_cast", "rms1p", "rms_bare", "layer", "layer1p", "none"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
RouterScore = Literal[
    "softmax", "sigmoid", "softmax_topk", "sigmoid_topk", "sparsemixer", "sqrt_softplus"
]


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last axis.

    `rms` scales by weight / root mean square (Zhang & Sennrich 2019); `rms_late_cast` does so
    before it rounds to the model's dtype instead of after; `rms1p` scales by 1 + weight, `rms_bare`
    by 1; `layer` also removes the mean (Ba et al. 2016), `layer1p` with 1 + weight, `none` without
    weight.
    """

    kind: NormKind = "rms"
    eps: float = 1e-6
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with H query heads over K key/value heads of D values.

    `window`: a query sees itself and the `window - 1` tokens before it; None sees all. If not
    `is_causal`, it also sees as many of the tokens after it, and nothing is kept, and `distances`
    may add to scores. `chunk`: it sees the tokens since the last position that is a multiple of
    `chunk`. Tokens of a picture that attends to itself in both directions also see those after
    them, unless `ignores_spans`. `softcap` c bounds scores as c * tanh(score / c). `sinks`: one
    learned logit per head that takes part in the softmax and has no value. `clip` bounds queries,
    keys and values as they are projected. `qk_norm` normalises queries and keys before or after
    rotation: over each head with one weight for all of them (head) or one for each (per_head;
    heads_apart: stored as a tensor for each), or over the full width. `value_norm` normalises each
    head's values as its keys, without a weight. `values_are_keys`: values are the keys as they are
    projected. `value_dim`: values have fewer numbers than keys, and are kept with zeros after them.
    `gate` full: the attended values are multiplied by sigmoid(Wg @ h) before the output projection;
    per_head: each head with one number.

    `shares` is the layer whose keys and values this one reads, in place of its own; it must be an
    earlier one with heads and a window like these.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "full", "per_head", "heads_apart"] = "head"
    qk_norm_after_rope: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    temperature: Temperature | None = None
    clip: float | None = None
    alibi: Alibi | None = None
    gate: Literal["none", "full", "per_head"] = "none"
    value_norm: bool = False
    values_are_keys: bool = False
    value_dim: int | None = None
    shares: int | None = None
    is_causal: bool = True
    ignores_spans: bool = False
    distances: DistanceScores | None = None

    @property
    def memory(self) -> KeyValues | None:
        """Keys and values of the tokens that queries see; None where they see their own step's."""
        if not self.is_causal:
            return None
        window = self.window if self.chunk is None else self.chunk
        return KeyValues(
            self.kv_heads,
            self.head_dim,
            window,
            is_chunked=self.chunk is not None,
            ignores_spans=self.ignores_spans,
        )

    @property
    def widest(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def flops(self, context: int) -> int:
        """Operations apart from those with weights, for a token that sees `context` tokens."""
        if self.memory is not None:
            seen = self.memory.num_seen(context)
        else:
            seen = context if self.window is None else min(context, 2 * self.window - 1)
        return 4 * self.heads * self.head_dim * seen


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the `top_k` tokens that a query attends to (DeepSeek sparse attention).

    A token's score is the sum of `heads` products of `dim` numbers, each at least 0 and times a
    weight of the query. Queries come from the attention's latent of queries, or through
    `query_norm` from the hidden state, and keys from the hidden state through `norm`; their first
    numbers rotate by `rope`. `temperature` is that of the queries before they rotate. is_shared:
    the choice is that of the last layer before with an indexer of its own, and nothing else of this
    counts.
    """

    heads: int
    dim: int
    top_k: int
    norm: Norm
    rope: Rope | None = None
    is_shared: bool = False
    query_norm: Norm | None = None
    temperature: LearnedTemperature | None = None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Causal softmax attention whose H heads share one latent of `rank` r values per token and one
    rotated key of `rotated` R values (multi-head latent attention, DeepSeek-V2 section 2.1).

    A query head has `unrotated` P + R values; keys [P] and values of `value_dim` V values are
    products of the normed latent with the head's part of `kv_b`. `q_rank`: queries come from a
    latent of their own with so many values; None: from the hidden states. `norm` is that of both
    latents. `bias`: of the products that make the latents; `o_bias`: of the output's. `indexer`:
    queries attend to the tokens that it chooses; None: to all. `gate`: each head's attended values
    are multiplied by the sigmoid of a projection to one number.

    `shares` is the layer whose latents and rotated keys this one reads, in place of its own; it
    must be an earlier one with as many numbers. Keys for the choice are its own.
    """

    heads: int
    rank: int
    unrotated: int
    rotated: int
    value_dim: int
    scale: float
    norm: Norm
    q_rank: int | None = None
    rope: Rope | None = None
    bias: bool = False
    o_bias: bool = False
    indexer: Indexer | None = None
    gate: bool = False
    temperature: Temperature | LearnedTemperature | None = None
    shares: int | None = None

    @property
    def memory(self) -> Latents:
        """Tokens' normed latents and rotated keys unless another layer has them, and index keys."""
        rank, rotated = (self.rank, self.rotated) if self.shares is None else (0, 0)
        if self.indexer is None:
            return Latents(rank, rotated)
        return Latents(rank, rotated, self.indexer.dim if self.chooses else 0)

    @property
    def chooses(self) -> bool:
        """Whether it has an indexer of its own."""
        return self.indexer is not None and not self.indexer.is_shared

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation: its queries, absorbed."""
        return self.heads * (self.rank + self.rotated)

    def flops(self, context: int) -> int:
        """Multiplications and additions, apart from those with weights, for a token that sees
        `context` tokens: the latent with its rotated key, and once more the latent.
        """
        per_key = 2 * self.heads * (2 * self.rank + self.rotated)
        if self.indexer is None:
            return per_key * context
        scored = 0 if self.indexer.is_shared else 2 * self.indexer.heads * self.indexer.dim
        return per_key * min(context, self.indexer.top_k) + scored * context


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Chooses the `top_k` blocks of `size` positions that a query attends to (MiniMax-M3).

    A block's score is the largest product of its keys of `dim` numbers with a query; there is a
    query, and a choice, for each of `heads` groups of the attention's heads. The query's own block
    and those before it, `local` together, come first.
    """

    heads: int
    dim: int
    size: int
    top_k: int
    local: int


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Causal softmax attention with H query heads over K key/value heads of D values, of which a
    query sees those of chosen blocks.

    `norm` is of each head of queries and keys, those of the `indexer` included, and `rope` rotates
    them.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    norm: Norm
    rope: Rope
    indexer: BlockIndexer

    @property
    def memory(self) -> Latents:
        """Keys and values of all heads as one row of every token, and what it is chosen by."""
        return Latents(2 * self.kv_heads * self.head_dim, 0, self.indexer.dim)

    @property
    def widest(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def flops(self, context: int) -> int:
        """Operations apart from those with weights, for a token that sees `context` tokens."""
        seen = min(context, self.indexer.top_k * self.indexer.size)
        scored = 2 * self.indexer.heads * self.indexer.dim * context
        return 4 * self.heads * self.head_dim * seen + scored


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(up(x))), or when gated down(act(gate(x)) * up(x)), with F = `width`.

    `bias` is that of all products, `out_bias` of `down` alone. `xielu` has learned numbers (Huang &
    Schlag 2024) and is never gated. `sparsity`: the share of the gates that are cut off, where they
    are distributed normally; the others are lessened by the value of the cut (Gemma 3n). `bound`:
    act(gate) is at most this, and up(x) lies within it on both sides (Step-3.5). `clamp`: that of
    `Moe`.
    """

    width: int
    act: Activation = "silu"
    gated: bool = True
    bias: bool = False
    out_bias: bool = False
    sparsity: float = 0.0
    bound: float | None = None
    clamp: float | None = None


@dataclass(frozen=True, slots=True)
class Moe:
    """`top_k` of `experts` feed-forward networks of `width` F per token, gated or not as in `Mlp`.

    `score`, `renorm` (with `renorm_eps` and `renorm_min`), `scale`, `groups` (with `top_groups` and
    `group_best`) and `jitter` say how experts are chosen and weighed: see `ops.RouteArgs`.
    `select_bias`: a learned bias joins the scores for the choice only. `wide_router`: the router's
    logits are not rounded to the model's dtype. `weighs_input`: weights multiply the experts'
    inputs, not their results.

    `clamp` c is gpt-oss's form: gate at most c, up within ±c, (up + 1) * gate * sigmoid(1.702
    gate). `bound` is that of `Mlp`. `shared` is a feed-forward part that all tokens go through; its
    result is added to the rounded sum of the chosen experts', with `shared_gate` times the sigmoid
    of a projection to one number. sqrt_softplus: see `ops.route_softplus`. `by_id`: rows of a table
    that has the experts of each token id; 0: the router chooses. `expert_scales`: a learned factor
    of each expert's results. `latent`: the width that the chosen experts read and give; one product
    makes it of the inputs, and another one makes the decoder's width of the results. None: they
    have the decoder's width.
    """

    experts: int
    top_k: int
    width: int
    act: Activation = "silu"
    gated: bool = True
    score: RouterScore = "softmax"
    renorm: bool = True
    renorm_eps: float = 1e-20
    renorm_min: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    jitter: float = 0.0
    select_bias: bool = False
    bias: bool = False
    router_bias: bool = False
    wide_router: bool = False
    weighs_input: bool = False
    clamp: float | None = None
    bound: float | None = None
    expert_scales: bool = False
    by_id: int = 0
    shared: Mlp | None = None
    shared_gate: bool = False
    latent: int | None = None


@dataclass(frozen=True, slots=True)
class DenseAndExperts:
    """A dense part and a mixture that read the residual stream x, each through a norm of its own,
    with a norm of each result before they are added (Gemma 4). The router reads x / rms(x) * weight
    * `router_scale`.
    """

    dense: Mlp
    experts: Moe
    norm: Norm
    router_scale: float

    @property
    def width(self) -> int:
        """Numbers of a token's widest activation."""
        return max(self.dense.width, self.experts.width)


SingleMixer = Attention | LatentAttention | BlockAttention | RecurrentMixer | RecentTokens | Entries
"""A mixer by itself. Its `memory` states what it remembers of a request; None: nothing."""


@dataclass(frozen=True, slots=True)
class ParallelMixers:
    """Mixers of one input whose results are added: attention and one with a recurrent state."""

    mixers: tuple[SingleMixer, ...]


@dataclass(frozen=True, slots=True)
class SharedTransformer:
    """One use of a transformer that several layers share (Zamba2): number `number` of them.

    For the residual stream x and the embeddings e it is W @ mlp(norm(attention(norm([x, e])))). W
    is the layer's own, and so are products through `rank` numbers that are added to the
    feed-forward part's gates and inputs, and through `attention_rank` to queries, keys and values
    (0: not).
    """

    number: int
    attention: Attention
    mlp: Mlp
    norm: Norm
    rank: int
    attention_rank: int


@dataclass(frozen=True, slots=True)
class MixerAfterShared:
    """A mixer of norm(x + t): t, a shared transformer of x, is not in the residual sum."""

    shared: SharedTransformer
    mixer: RecurrentMixer

    @property
    def mixers(self) -> tuple[SingleMixer, ...]:
        """In the order of their memories."""
        return (self.shared.attention, self.mixer)


@dataclass(frozen=True, slots=True)
class AttentionOverEmbedding:
    """Attention that reads [norm(e), h] of the token's embedding e, as the first stage leaves it,
    and the layer's normed input h (EAGLE-3, Li et al. 2025).
    """

    attention: Attention
    norm: Norm

    @property
    def mixers(self) -> tuple[SingleMixer, ...]:
        """In the order of their memories."""
        return (self.attention,)


Composite = ParallelMixers | MixerAfterShared | AttentionOverEmbedding | CompressedAttention
"""Several mixers in one, or one next to something else."""

Mixer = SingleMixer | Composite


def single_mixers(mixer: Mixer | None) -> tuple[SingleMixer, ...]:
    """The mixers of a layer, in the order of their memories."""
    if isinstance(mixer, Composite):
        return mixer.mixers
    return () if mixer is None else (mixer,)


def shares(mixer: SingleMixer) -> bool:
    """Whether a mixer reads the memory of another layer's and has none of its own."""
    if isinstance(mixer, LatentAttention):
        return mixer.shares is not None and not mixer.chooses
    return isinstance(mixer, Attention) and mixer.shares is not None


FeedForward = Mlp | Moe | DenseAndExperts
"""Any feed-forward part, which treats each token by itself."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A vector v of `width` numbers for each token and layer (per-layer embeddings, Gemma 3n): v =
    (sqrt(width) * table[id] + norm(W @ x / sqrt(dim))) / sqrt(2), where x is the scaled embedding
    and the table has `vocab` rows. media_id: the id that is looked up where the rows of an encoder
    stand; None: that of the placeholder.
    """

    width: int
    vocab: int
    norm: Norm
    media_id: int | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: x += r * post(f(pre(x))) for the token mixer and then for the feed-forward part, r
    = `residual_scale`. A layer may lack either.

    `pre` and `post` say whether these norms exist; without `mixer_pre` the mixer reads x as it is,
    and `mlp_post` is a norm after the feed-forward part alone.
    `norms_sum`: x = norm(x + r * f(x)) instead, which is the only norm. In a `parallel` block the
    feed-forward part reads the x that the mixer has read, through a norm of its own (two_norms) or
    the mixer's (one_norm).

    `input_act`: a third part adds norm(Wp @ (act(Wg @ x) * v)), where v is the layer's vector of
    `Decoder.layer_inputs`. `scaled`: the layer's result is x times one learned number. `repeats`:
    the earlier layer whose weights this one runs with, and which remembers nothing; None: it has
    its own.
    """

    mixer: Mixer | None
    mlp: FeedForward | None
    norm: Norm
    pre: bool = True
    post: bool = False
    residual_scale: float = 1.0
    parallel: Literal["no", "two_norms", "one_norm"] = "no"
    input_act: Activation | None = None
    scaled: bool = False
    norms_sum: bool = False
    mixer_pre: bool = True
    mlp_post: bool = False
    repeats: int | None = None

    @property
    def has_mixer_pre(self) -> bool:
        """Whether there is a norm before the mixer."""
        return self.pre and self.mixer_pre and not self.norms_sum

    @property
    def has_post(self) -> bool:
        """Whether there are norms after the mixer and the feed-forward part."""
        return self.post or self.norms_sum

    @property
    def has_mlp_post(self) -> bool:
        """Whether there is a norm after the feed-forward part."""
        return self.has_post or self.mlp_post

    @property
    def has_mlp_pre(self) -> bool:
        """Whether the feed-forward part has a norm of its own before it."""
        is_apart = self.parallel == "one_norm" or isinstance(self.mlp, DenseAndExperts)
        return self.pre and not self.norms_sum and not is_apart

    @property
    def experts(self) -> Moe | None:
        """The layer's mixture."""
        mlp = self.mlp.experts if isinstance(self.mlp, DenseAndExperts) else self.mlp
        return mlp if isinstance(mlp, Moe) else None

    @property
    def memories(self) -> tuple[LayerMemory | None, ...]:
        """Memory of the layer: an entry for each mixer that does not read another layer's."""
        if self.repeats is not None:
            return ()
        return tuple(mixer.memory for mixer in single_mixers(self.mixer) if not shares(mixer))


@dataclass(frozen=True, slots=True)
class Streams:
    """`count` n residual streams (alternating updates, Baykal et al. 2023): a layer predicts all of
    them, runs on number `active`, and corrects all by the outcome; what is predicted and corrected
    depends on tanh(R @ norm(stream) / dim), n numbers. Its block has norms before and
    after each part and an `input_act`, whose part reads the corrected active stream, times a
    learned vector, and is added to all streams but the first.

    The sum after the mixer also has `low_rank` r: h + norm(B @ A @ h) of the mixer's input h, and
    is divided by sqrt(2) (learned augmented residual layer, Gemma 3n).
    """

    count: int
    active: int
    low_rank: int


@dataclass(frozen=True, slots=True)
class HyperStreams:
    """`count` n residual streams (hyper-connections, Xie et al. 2026), each the embedding at first:
    a part of a layer reads a sum of them, and its result is added to each after a matrix has mixed
    them; the weights of both and the matrix depend on all streams over their root mean square, with
    `norm_eps`. `eps` and `rounds`: see `ops.mixers.streams.HyperWeights`. The final norm reads a
    sum of all.
    """

    count: int
    norm_eps: float
    eps: float
    rounds: int


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Layers `first` to `last` - 1 of the `count` layers of a whole decoder: stage `number`.
    `has_ends` False: what comes before the first layer is left out. `lends_table`: it has the
    embedding's table, for a network that drafts next to it, though its layers read states.
    """

    first: int
    last: int
    count: int
    number: int = 0
    has_ends: bool = True
    lends_table: bool = False

    @property
    def is_last(self) -> bool:
        """Whether its last layer is that of the whole decoder."""
        return self.last == self.count


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole decoder: embedding, L blocks, final norm (None: it has none), language-model head or
    pooler.

    `learned_positions` counts the rows of a learned position table (0: none), which begin after
    `position_offset` rows that no token uses. `token_types` counts the rows of a table of types,
    such as first and second text, which are added like positions. `embed_norm` normalises what
    enters the first block. `embed_width`: rows of these tables have so many values, of which a
    product with a bias makes `dim` after the norm; None: they have `dim`.
    `context` is the number of positions that the config declares, None where it declares none.
    Logits are c * tanh(l / c) of l = `logit_scale` * head(x) where `logit_softcap` c is given.
    `leaf_scales` are factors of leaves of every layer, by the ends of their names. `layer_inputs`
    are what layers with an `input_act` read. `streams`: in place of one residual stream.
    `pooler`: in place of a language-model head, or next to it. `stage`: the decoder is a piece of a
    whole one, with the layers of this stage (models/cutting/stages.py); None: it is whole.
    """

    vocab: int
    dim: int
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    context: int | None
    embed_scale: float = 1.0
    learned_positions: int = 0
    position_offset: int = 0
    embed_norm: Norm | None = None
    tie: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    leaf_scales: tuple[tuple[str, float], ...] = ()
    layer_inputs: LayerInputs | None = None
    streams: Streams | HyperStreams | None = None
    pooler: PoolerSpec | None = None
    token_types: int = 0
    embed_width: int | None = None
    stage: PipelineStage | None = None

    @property
    def first_layer(self) -> int:
        """The number that the first of `blocks` has in the whole decoder."""
        return 0 if self.stage is None else self.stage.first

    @property
    def embeds(self) -> bool:
        """Whether the first of its layers reads embeddings, not another stage's hidden states."""
        return self.first_layer == 0 and (self.stage is None or self.stage.has_ends)

    @property
    def has_table(self) -> bool:
        """Whether it has the embedding's table: to embed or lend, or because its head is tied."""
        reads_tokens = self.pooler is not None and self.pooler.reads_tokens
        is_tied = self.tie and (self.generates or reads_tokens)
        return self.embeds or is_tied or self.lends_table

    @property
    def lends_table(self) -> bool:
        """Whether it has the embedding's table for another model alone."""
        return not self.embeds and self.stage is not None and self.stage.lends_table

    @property
    def is_last(self) -> bool:
        return self.stage is None or self.stage.is_last

    @property
    def layers_read_ids(self) -> bool:
        """Whether layers look tokens up in tables of their own."""
        by_id = (b.experts.by_id for b in self.blocks if b.experts is not None)
        return self.layer_inputs is not None or any(by_id)

    @property
    def table_width(self) -> int:
        """Values in a row of the embedding table."""
        return self.dim if self.embed_width is None else self.embed_width

    @property
    def generates(self) -> bool:
        """Whether it has a language-model head that tokens are drawn with."""
        return self.is_last and (self.pooler is None or self.pooler.also_generates)

    @property
    def is_indivisible(self) -> bool:
        """Whether prompts must be computed in one step, since tokens see those after them."""
        mixers = (mixer for block in self.blocks for mixer in single_mixers(block.mixer))
        return any(isinstance(mixer, Attention) and not mixer.is_causal for mixer in mixers)

    @property
    def memories(self) -> tuple[LayerMemory | None, ...]:
        """Memory of its layers. A layer without a mixer has no entry."""
        return tuple(memory for block in self.blocks for memory in block.memories)


def rope_of_axes(decoder: Decoder) -> Rope | None:
    """The rotation on several axes, the same in all layers; None: positions have one axis."""
    mixers = (mixer for block in decoder.blocks for mixer in single_mixers(block.mixer))
    ropes = {m.rope for m in mixers if isinstance(m, Attention) and m.rope is not None}
    if not any(rope.axes for rope in ropes):
        return None
    assert len(ropes) == 1, "layers with rotations of their own have positions on one axis"
    return ropes.pop()


def learned_rope(decoder: Decoder) -> Rope | None:
    """The rotation whose frequencies have learned factors, which is the same in all layers that
    rotate, those of whole decoders and of stages.
    """
    mixers = (mixer for block in decoder.blocks for mixer in single_mixers(block.mixer))
    ropes = (mixer.rope for mixer in mixers if isinstance(mixer, LatentAttention))
    found = {rope for rope in ropes if rope is not None and rope.learned}
    assert len(found) < 2, "layers that rotate alike"
    return found.pop() if found else None


def shared_distances(decoder: Decoder) -> tuple[Attention, DistanceScores] | None:
    """The whole decoder's table of scores by distance and an attention of it, or None."""
    found: tuple[Attention, DistanceScores] | None = None
    for mixer in (mixer for block in decoder.blocks for mixer in single_mixers(block.mixer)):
        scores = mixer.distances if isinstance(mixer, Attention) else None
        if scores is None or (isinstance(scores, BucketBias) and not scores.is_shared):
            continue
        assert isinstance(mixer, Attention) and (found is None or found[1] == scores), "one table"
        found = mixer, scores
    return found


def shared_transformers(decoder: Decoder) -> dict[int, SharedTransformer]:
    """The first use of each shared transformer, by number; all uses have the same parts."""
    found: dict[int, SharedTransformer] = {}
    for block in decoder.blocks:
        if isinstance(block.mixer, MixerAfterShared):
            use = block.mixer.shared
            assert found.setdefault(use.number, use) == use, "another transformer of this number"
    return found
