"""A spec in words: what `quire show` prints about a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from quire.models.costs import active_parameters, flops_per_token
from quire.models.foreign.spec import ForeignDecoder
from quire.models.foreign.words import foreign_lines
from quire.models.kv_pool import (
    memories_of,
    plan_kv_pool,
    state_bytes,
    suited_block_size,
    token_bytes,
)
from quire.models.layer_memory import NumberBytes, TokenMemory
from quire.models.mixers.compressed.spec import CompressedAttention, Entries, RecentTokens
from quire.models.mixers.recurrent.words import describe as recurrent
from quire.models.parameters import layer_parameters, num_parameters
from quire.models.pooling.show import pooler_lines
from quire.models.positions import (
    BucketBias,
    DistanceScores,
    DynamicScaling,
    LearnedTemperature,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    Temperature,
    YarnScaling,
)
from quire.models.spec import (
    Attention,
    Block,
    BlockAttention,
    Decoder,
    DenseAndExperts,
    HyperStreams,
    Indexer,
    LatentAttention,
    MixerAfterShared,
    Mlp,
    Moe,
    Norm,
    SharedTransformer,
    SingleMixer,
    Streams,
    single_mixers,
)

_BLOCK_SIZE = 32
"""The default."""

_NORM_WORDS = {
    "rms": "rms_norm",
    "rms_late_cast": "rms_norm",
    "rms1p": "rms_norm_1p",
    "rms_bare": "rms_norm_bare",
    "layer": "layer_norm",
    "layer1p": "layer_norm_1p",
    "none": "layer_norm_without_weight",
}


def describe(decoder: Decoder | ForeignDecoder, *, weight_bytes: int = 2, kv_bytes: int = 2) -> str:
    """Figures and layers as readable pseudo-code; equal consecutive layers are shown once.

    `weight_bytes` and `kv_bytes` are bytes per value of weights and KV cache.
    """
    number = NumberBytes(weight_bytes, kv_bytes)
    if isinstance(decoder, ForeignDecoder):
        lines = [*foreign_lines(decoder, weight_bytes, number), "", *_groups(decoder, number)]
        return "\n".join(lines)
    parts = (
        _figures(decoder, weight_bytes, number), _program(decoder), _groups(decoder, number)
    )  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts)


def figures_of(
    decoder: Decoder | ForeignDecoder, *, weight_bytes: int = 2, kv_bytes: int = 2
) -> dict[str, Any]:
    """The figures of `describe` by name, for programs; None for what the model does not have."""
    number = NumberBytes(weight_bytes, kv_bytes)
    own: dict[str, Any] = {"num_active_parameters": None, "context": None, "flops_per_token": None}
    if isinstance(decoder, ForeignDecoder):
        total, num_layers = decoder.num_parameters, decoder.num_layers
        per_token = token_bytes(decoder.memories, number)
        per_request = state_bytes(decoder.memories, number)
    else:
        total, num_layers = num_parameters(decoder), len(decoder.blocks)
        memories = memories_of([decoder])
        per_token, per_request = token_bytes(memories, number), state_bytes(memories, number)
        own = {
            "num_active_parameters": active_parameters(decoder),
            "context": decoder.context,
            "flops_per_token": flops_per_token(decoder),
        }
    return {
        "num_parameters": total,
        "weight_bytes": total * weight_bytes,
        "num_layers": num_layers,
        "hidden_size": decoder.dim,
        "vocab_size": decoder.vocab,
        "kv_bytes_per_token": per_token,
        "state_bytes_per_request": per_request,
        **own,
    }


def _figures(d: Decoder, weight_bytes: int, number: NumberBytes) -> Iterator[str]:
    total, active = num_parameters(d), active_parameters(d)
    yield f"parameters        {total:,} ({total * weight_bytes / 2**30:.2f} GiB)"
    if any(b.experts is not None for b in d.blocks):
        yield f"active per token  {active:,}"
    yield f"layers            {len(d.blocks)}"
    yield f"hidden width      {d.dim:,}"
    yield f"vocabulary        {d.vocab:,}" + (
        " (head tied to embedding)" if d.tie and d.generates else ""
    )
    context = "of any length" if d.context is None else f"{d.context:,} tokens"
    yield f"context           {context}"
    memories = memories_of([d])
    if any(isinstance(memory, TokenMemory) for memory in memories):
        yield f"KV cache          {token_bytes(memories, number):,} bytes per token"
    if state := state_bytes(memories, number):
        yield f"recurrent state   {state:,} bytes per request"
    yield f"arithmetic        {flops_per_token(d) / 1e9:.2f} GFLOP per token, and attention"


def _program(d: Decoder) -> Iterator[str]:
    scale = "" if d.embed_scale == 1 else f" * {d.embed_scale:g}"
    width = d.table_width
    yield f"x = embedding[{d.vocab} x {width}](ids){scale}"
    if d.learned_positions:
        offset = f" + {d.position_offset}" if d.position_offset else ""
        rows = d.position_offset + d.learned_positions
        yield f"x = x + position_embedding[{rows} x {width}](positions{offset})"
    if d.token_types:
        yield f"x = x + type_embedding[{d.token_types} x {width}](types)"
    if d.embed_norm is not None:
        yield f"x = {_norm(d.embed_norm)}(x)"
    if d.embed_width is not None:
        yield f"x = W[{d.dim} x {width}] @ x + bias"
    if (i := d.layer_inputs) is not None:
        table = f"{i.width**0.5:g} * table[{i.vocab} x {i.width}](ids)"
        yield f"v = ({table} + {_norm(i.norm)}(W @ x / {d.dim**0.5:g})) / sqrt(2)    # each layer's"
    if isinstance(d.streams, HyperStreams):
        yield f"s = {d.streams.count} streams, each x"
    elif d.streams is not None:
        yield f"x = {d.streams.count} streams: x, and others = Wi @ x with its magnitude"
    start = 0
    for block, equal in groupby(d.blocks):
        count = len(list(equal))
        yield f"layers {start}..{start + count - 1}:" if count > 1 else f"layer {start}:"
        if block.repeats is not None:
            yield f"    # as layer {block.repeats}, with its weights"
            start += count
            continue
        size = sum(p.size for p in layer_parameters(d, start).values())
        yield f"    # {size:,} parameters each" if count > 1 else f"    # {size:,} parameters"
        lines = _block(block)
        if isinstance(d.streams, HyperStreams):
            lines = _hyper_block(d.streams, block)
        elif d.streams is not None:
            lines = _block_of_streams(d.streams, block)
        yield from (f"    {line}" for line in lines)
        start += count
    if isinstance(d.streams, HyperStreams):
        yield f"x = {_hyper_sum(d.streams)}"
    elif d.streams is not None:
        yield "x = mean of the first stream and of Wi @ the others with its magnitude"
    if d.final_norm is not None:
        yield f"x = {_norm(d.final_norm)}(x)"
    if d.generates:
        yield from _head(d)
    if d.pooler is not None:
        yield from pooler_lines(d.pooler, d.dim)


def _head(d: Decoder) -> Iterator[str]:
    scale = "" if d.logit_scale == 1 else f" * {d.logit_scale:g}"
    product = f"{'embedding' if d.tie else 'head'}[{d.vocab} x {d.dim}] @ x"
    if d.head_bias:
        product = f"({product} + bias)" if scale else f"{product} + bias"
    yield f"logits = {product}{scale}"
    if d.logit_softcap is not None:
        yield f"logits = {d.logit_softcap:g} * tanh(logits / {d.logit_softcap:g})"


def _block(b: Block) -> Iterator[str]:
    if b.mixer is not None:
        after = ""
        if isinstance(b.mixer, MixerAfterShared):
            yield from _shared_transformer(b.mixer.shared)
            after = " + t"
        yield f"h = {_norm(b.norm)}(x{after})" if b.has_mixer_pre else f"h = x{after}"
        if b.parallel != "no":
            yield from _parallel(b)
            return
        yield from _mixer(b)
        yield _residual(b)
    if b.mlp is not None:
        yield f"h = {_norm(b.norm)}(x)" if b.has_mlp_pre else "h = x"
        yield from _feed_forward(b, "h")
        yield _residual(replace(b, post=b.has_mlp_post))
    if b.input_act is not None:
        yield f"h = Wp @ ({b.input_act}(Wg @ x) * v)"
        yield _residual(replace(b, post=True))
    if b.scaled:
        yield "x = s * x    # one learned number"


def _block_of_streams(s: Streams, b: Block) -> Iterator[str]:
    router = f"tanh(Wr @ {_norm(b.norm)}(x) / dim)"
    yield f"x, others = prediction by P @ {router}    # the active one is number {s.active}"
    yield f"h = {_norm(b.norm)}(x)"
    yield f"g = h + {_norm(b.norm)}(B @ A @ h)    # rank {s.low_rank}"
    yield from _mixer(b)
    yield f"x = (x + {_norm(b.norm)}(h) + g) / sqrt(2)"
    yield f"h = {_norm(b.norm)}(x)"
    yield from _feed_forward(b, "h")
    yield _residual(b)
    yield f"x, others += (1 + C @ {router}) * (x - its prediction)"
    yield f"h = Wp @ ({b.input_act}(Wg @ (s * x)) * v)"
    yield f"all but the first += {_norm(b.norm)}(h)"


def _hyper_block(s: HyperStreams, b: Block) -> Iterator[str]:
    assert b.mlp is not None, "two parts"
    for lines in (_mixer(b), _feed_forward(b, "h")):
        yield f"h = {_norm(b.norm)}({_hyper_sum(s)})"
        yield from lines
        yield f"M = softmax(a * (Wm @ n) + b)    # balanced {s.rounds} times, eps {s.eps:g}"
        yield "s = M^T @ s + 2 * sigmoid(a * (Wp @ n) + b) * h"


def _hyper_sum(s: HyperStreams) -> str:
    return f"sum of (sigmoid(a * (Ws @ n) + b) + {s.eps:g}) * s, n = s / rms(s, eps {s.norm_eps:g})"


def _shared_transformer(s: SharedTransformer) -> Iterator[str]:
    yield f"h = {_norm(s.norm)}(x, embedding)    # transformer {s.number}, which layers share"
    yield from _attention(s.attention)
    yield f"h = {_norm(s.norm)}(h)"
    yield from _mlp(s.mlp, "h")
    adapted = f"rank {s.rank} next to Wg and Wu"
    if s.attention_rank:
        adapted = f"rank {s.attention_rank} next to W, {adapted}"
    yield f"t = Wt @ h    # the layer's own, and so are products of {adapted}"


def _mixer(b: Block) -> Iterator[str]:
    if isinstance(b.mixer, CompressedAttention):
        yield from _compressed_attention(b.mixer)
        return
    mixers = single_mixers(b.mixer)
    if isinstance(b.mixer, MixerAfterShared):
        mixers = (b.mixer.mixer,)
    if len(mixers) > 1:
        yield "h = sum of the results for the same h of"
    for mixer in mixers:
        lines = _single_mixer(mixer)
        yield from (f"    {line}" for line in lines) if len(mixers) > 1 else lines


def _compressed_attention(a: CompressedAttention) -> Iterator[str]:
    sizes = f"{a.heads} heads of {a.head_dim}, through {a.q_rank}"
    yield f"q = Wqb @ rms[eps {a.eps:g}](Wqa @ h)    # {sizes}"
    yield f"q, k = rms[eps {a.eps:g}](q), rms[eps {a.eps:g}](Wk @ h)    # heads; one k, which is v"
    yield f"q, k = rotate(q), rotate(k)    # the last {a.rope.dim}, {_rope(a.rope, a.rope.dim)}"
    seen = f"the last {a.window} tokens"
    if (c := a.compression) is not None:
        over = f"{c.span} tokens, every {c.rate}"
        yield f"e = rotate(rms(sum of softmax(Wg @ h + bias) * (We @ h)))    # over {over}"
        seen += " and the entries before"
        if (i := c.indexer) is not None:
            yield f"iq, ik = Wiq @ (the latent of q), the same as e    # {i.heads} of {i.dim}"
            chosen = f"attends to the {i.top_k:,} entries with the largest"
            yield f"i = sum of (Wiw @ h) * relu(iq @ ik)    # {chosen}"
    yield f"s = {a.head_dim**-0.5:g} * q @ (k, e)"
    yield f"h = rotate back(softmax(s) @ (k, e))    # over {seen} and one sink per head"
    yield f"h = Wob @ (Woa @ h)    # {a.groups} groups of heads to {a.group_rank} each"


def _single_mixer(mixer: SingleMixer) -> Iterator[str]:
    assert not isinstance(mixer, RecentTokens | Entries), "parts of a whole"
    if isinstance(mixer, Attention):
        return _attention(mixer)
    if isinstance(mixer, BlockAttention):
        return _block_attention(mixer)
    return _latent_attention(mixer) if isinstance(mixer, LatentAttention) else recurrent(mixer)


def _parallel(b: Block) -> Iterator[str]:
    """Lines of a parallel block, after `h = norm(x)`: both parts read the same x."""
    yield f"g = {_norm(b.norm)}(x)    # of its own" if b.has_mlp_pre else "g = h"
    yield from _mixer(b)
    yield _residual(b)
    yield from _feed_forward(b, "g")
    yield _residual(b)


def _feed_forward(b: Block, x: str) -> Iterator[str]:
    assert b.mlp is not None
    if isinstance(b.mlp, DenseAndExperts):
        return _dense_and_experts(b.mlp, x)
    return _moe(b.mlp, x) if isinstance(b.mlp, Moe) else _mlp(b.mlp, x)


def _dense_and_experts(m: DenseAndExperts, x: str) -> Iterator[str]:
    norm = _norm(m.norm)
    yield f"d, e, r = {norm}({x}), {norm}({x}), {m.router_scale:g} * {norm}({x})"
    yield from _mlp(m.dense, "d", "d")
    yield from _moe(m.experts, "e", "r")
    yield f"h = {norm}(d) + {norm}(h)"


def _residual(b: Block) -> str:
    if b.norms_sum:
        return f"x = {_norm(b.norm)}(x + h)"
    value = f"{_norm(b.norm)}(h)" if b.post else "h"
    return (
        f"x = x + {value}" if b.residual_scale == 1 else f"x = x + {b.residual_scale:g} * {value}"
    )


def _latent_attention(a: LatentAttention) -> Iterator[str]:
    bias = " + bias" if a.bias else ""
    sizes = f"{a.heads} heads of {a.unrotated} + {a.rotated}"
    if a.q_rank is None:
        yield f"q, r = Wq @ h    # {sizes}"
    else:
        yield f"q, r = Wqb @ {_norm(a.norm)}(Wqa @ h{bias})    # {sizes}, through {a.q_rank}"
    turned = "rotate(r)"
    if a.shares is None:
        yield f"c, k = Wkva @ h{bias}    # a latent of {a.rank} and a key of {a.rotated}, kept"
        yield f"c = {_norm(a.norm)}(c)"
        turned = "rotate(r), rotate(k)"
    else:
        yield f"c, k = those of layer {a.shares}    # a latent of {a.rank}, a key of {a.rotated}"
    if a.rope is not None:
        yield f"r{', k' if a.shares is None else ''} = {turned}    # {_rope(a.rope, a.rotated)}"
    if a.indexer is not None:
        yield from _indexer(a.indexer)
    if a.temperature is not None:
        yield f"q, r = (q, r) * {_temperature(a.temperature)}"
    yield f"s = {a.scale:g} * ((Wuk^T @ q) @ c + r @ k)"
    values = f"{a.heads} heads of {a.value_dim}"
    gate = "sigmoid(Wg @ h) * " if a.gate else ""
    bias = " + bias" if a.o_bias else ""
    yield f"h = Wo @ ({gate}(Wuv @ (softmax(s) @ c))){bias}    # {values}"


def _block_attention(a: BlockAttention) -> Iterator[str]:
    i, norm = a.indexer, _norm(a.norm)
    yield f"q, k, v = W @ h    # {a.heads} / {a.kv_heads} / {a.kv_heads} heads of {a.head_dim}"
    yield f"iq, ik = Wiq @ h, Wik @ h    # {i.heads} and 1 of {i.dim}"
    yield f"q, k, iq, ik = rotate({norm}(q, k, iq, ik))    # {_rope(a.rope, a.head_dim)}"
    yield (
        f"i = max of iq @ ik over a block of {i.size:,}    # attends to the {i.top_k:,} largest, "
        f"with the last {i.local}"
    )
    yield f"s = {a.scale:g} * q @ k"
    yield "h = Wo @ (softmax(s) @ v)    # over the tokens of chosen blocks"


def _temperature(t: Temperature | LearnedTemperature) -> str:
    if isinstance(t, LearnedTemperature):
        return "(scale * ln(1 + position) + bias)    # learned, of each head"
    place = f"(position + {t.first})" if t.first else "position"
    return f"(1 + {t.strength:g} * ln(1 + floor({place} / {t.interval:g})))"


def _indexer(i: Indexer) -> Iterator[str]:
    if i.is_shared:
        yield f"# attends to the {i.top_k:,} tokens that the last indexer before has chosen"
        return
    source = "(the latent of q)" if i.query_norm is None else f"{_norm(i.query_norm)}(h)"
    yield f"iq, ik = Wiq @ {source}, {_norm(i.norm)}(Wik @ h)    # {i.heads} of {i.dim}"
    if i.temperature is not None:
        yield f"iq = iq * {_temperature(i.temperature)}"
    if i.rope is not None:
        yield f"iq, ik = rotate(iq), rotate(ik)    # {_rope(i.rope, i.dim)}"
    chosen = f"attends to the {i.top_k:,} tokens with the largest"
    yield f"i = sum of (Wiw @ h) * relu(iq @ ik)    # {chosen}"


def _attention(a: Attention) -> Iterator[str]:
    bias = " + bias" if a.qkv_bias else ""
    if a.shares is not None:
        heads = f"{a.heads} heads of {a.head_dim}"
        yield f"q = W @ h{bias}    # {heads}; k, v are those of layer {a.shares}"
    else:
        heads = f"{a.heads} / {a.kv_heads} / {a.kv_heads} heads of {a.head_dim}"
        yield f"q, k, v = W @ h{bias}    # {heads}{'; v = k' if a.values_are_keys else ''}"
        if a.value_dim is not None:
            yield f"v = v, zeros    # {a.value_dim} values, kept as {a.head_dim}"
    if a.clip is not None:
        yield f"q, k, v = clamp(q, k, v)    # to +-{a.clip:g}"
    normed = [] if a.qk_norm is None else [_qk_norm(a, a.qk_norm)]
    both = "q, k" if a.shares is None else "q"
    turned = [] if a.rope is None else [f"{both} = rotate({both})    # {_rope(a.rope, a.head_dim)}"]
    yield from turned + normed if a.qk_norm_after_rope else normed + turned
    if a.value_norm and a.qk_norm is not None:
        yield f"v = {_norm(a.qk_norm)}(v)    # without a weight"
    if a.temperature is not None:
        yield f"q = q * {_temperature(a.temperature)}"
    yield f"s = {a.scale:g} * q @ k"
    if a.softcap is not None:
        yield f"s = {a.softcap:g} * tanh(s / {a.softcap:g})"
    if a.distances is not None:
        yield _distances(a.distances)
    if a.alibi is not None:
        scale = "" if a.alibi.scale == 1 else f"{a.alibi.scale:g} * "
        yield f"s = s - {scale}slope * distance    # ALiBi, largest bias {a.alibi.max_bias:g}"
    seen = "all tokens before" if a.window is None else f"the last {a.window} tokens"
    seen = seen if a.chunk is None else f"the tokens of its chunk of {a.chunk}"
    if not a.is_causal:
        reach = "" if a.window is None else f" less than {a.window} away"
        seen = f"all tokens of the prompt{reach}"
    sinks = " and one sink per head" if a.sinks else ""
    values = "(softmax(s) @ v)" if a.gate == "none" else "(sigmoid(Wg @ h) * (softmax(s) @ v))"
    gates = ", one gate for each head" if a.gate == "per_head" else ""
    yield f"h = Wo @ {values}{' + bias' if a.o_bias else ''}    # over {seen}{sinks}{gates}"


def _distances(d: DistanceScores) -> str:
    if isinstance(d, BucketBias):
        owner = "of all layers" if d.is_shared else "of this layer"
        return (
            f"s = s + table[bucket]    # {d.buckets} up to a distance of {d.max_distance}, {owner}"
        )
    products = [
        *(["q @ Wk(position)"] if d.has_keys else []),
        *(["Wq(position) @ k"] if d.has_queries else []),
    ]
    whose = "W of queries and keys" if d.shares_products else "W of its own"
    return f"s = s + the same of {' + '.join(products)}    # 2 x {d.span} positions, {whose}"


def _qk_norm(a: Attention, n: Norm) -> str:
    over = {
        "head": "each head",
        "full": "all heads together",
        "per_head": "each head, with its own weight",
        "heads_apart": "each head, with its own weight",
    }[a.qk_norm_over]
    if a.shares is not None:
        return f"q = {_norm(n)}(q)    # over {over}"
    return f"q, k = {_norm(n)}(q), {_norm(n)}(k)    # over {over}"


def _mlp(m: Mlp, x: str, into: str = "h") -> Iterator[str]:
    bias = " + bias" if m.bias else ""
    gate = f"Wg @ {x}" if not m.sparsity else f"sparse(Wg @ {x}, {m.sparsity:g})"
    inner = f"{m.act}({gate}) * (Wu @ {x})" if m.gated else f"{m.act}(Wu @ {x}{bias})"
    if m.clamp is not None:
        inner = _clamped(m.clamp)
    bound = "" if m.bound is None else f", factors bounded by {m.bound:g}"
    outer = " + bias" if m.bias or m.out_bias else ""
    yield f"{into} = Wd @ ({inner}){outer}    # width {m.width:,}{bound}"


def _clamped(limit: float) -> str:
    return f"g * sigmoid(1.702 g) * (u + 1), g and u bounded by {limit:g}"


def _moe(m: Moe, x: str, router: str | None = None) -> Iterator[str]:
    yield f"w = {_choice(m, router or x)}    # {m.experts} experts"
    if m.expert_scales:
        yield "w = w * scale[e]"
    if m.shared is not None:
        yield from _mlp(m.shared, x, "shared")
        if m.shared_gate:
            yield f"shared = sigmoid(Ws @ {x}) * shared"
    if m.latent is not None:
        yield f"n = Wi @ {x}    # {m.latent:,} numbers"
        x = "n"
    x = f"(w[e] * {x})" if m.weighs_input else x
    if m.clamp is not None:
        inner = _clamped(m.clamp)
    else:
        inner = f"{m.act}(Wg @ {x}) * (Wu @ {x})" if m.gated else f"{m.act}(Wu @ {x})"
    weight = "" if m.weighs_input else "w[e] * "
    also = "" if m.shared is None else " + shared"
    bound = "" if m.bound is None else f", factors bounded by {m.bound:g}"
    total = f"sum of {weight}Wd[e] @ ({inner})"
    total = total if m.latent is None else f"Wo @ ({total})"
    yield f"h = {total}{also}    # width {m.width:,}{bound}"


def _choice(m: Moe, x: str) -> str:
    """The weights of the chosen experts for the input x."""
    bias = ", chosen with a bias" if m.select_bias else ""
    if m.groups > 1:
        bias += f", from the best {m.top_groups} of {m.groups} groups"
    if m.by_id:
        return f"{m.score}(Wr @ {x}) of the {m.top_k} in table[ids], made to sum to {m.scale:g}"
    if m.score in ("softmax_topk", "sigmoid_topk"):
        text = f"{m.score.removesuffix('_topk')} of the top {m.top_k} of Wr @ {x}"
    elif m.score == "sparsemixer":
        text = f"top {m.top_k} of Wr @ {x} by sparsemixer with jitter {m.jitter:g}"
    else:
        renorm = ", made to sum to 1" if m.renorm else ""
        text = f"top {m.top_k} of {m.score}(Wr @ {x}){renorm}"
    return text + bias + ("" if m.scale == 1 else f", times {m.scale:g}")


def _norm(n: Norm) -> str:
    return f"{_NORM_WORDS[n.kind]}[eps {n.eps:g}]"


def _rope(r: Rope, head_dim: int) -> str:
    part = "" if r.dim == head_dim else f", the first {r.dim} of {head_dim} values"
    pairs = ", pairs of neighbours" if r.interleaved else ""
    learned = ", times learned factors" if r.learned else ""
    return f"base {r.theta:g}{part}{pairs}{_scaling(r)}{learned}"


def _scaling(r: Rope) -> str:
    s = r.scaling
    if isinstance(s, LinearScaling):
        return f", linear scaling by {s.factor:g}"
    if isinstance(s, DynamicScaling):
        return f", dynamic NTK by {s.factor:g} if max_model_len exceeds {s.original:,}"
    if isinstance(s, Llama3Scaling):
        return f", llama3 scaling by {s.factor:g} from {s.original:,}"
    if isinstance(s, YarnScaling):
        return f", yarn by {s.factor:g} from {s.original:,}"
    if isinstance(s, ProportionalScaling):
        factor = "" if s.factor == 1 else f" divided by {s.factor:g}"
        return f", of {r.dim // 2} frequencies the first {s.turning}{factor}"
    if isinstance(s, LongRopeScaling):
        return f", longrope: long factors if max_model_len exceeds {s.original:,}"
    return ""


def _groups(d: Decoder | ForeignDecoder, number: NumberBytes) -> Iterator[str]:
    memories = memories_of([d])
    pool = plan_kv_pool(memories, suited_block_size(memories, _BLOCK_SIZE, number), number)
    if not pool.block_bytes:
        yield "KV groups: none, nothing is kept of a request"
        return
    yield f"KV groups, which share blocks of {pool.block_bytes:,} bytes"
    for group in pool.groups:
        word = "window" if group.chunk is None else "chunks of"
        window = "" if group.window is None else f", {word} {group.window}"
        unused = pool.unused(group)
        note = f"; {unused:.1%} of a block unused" if unused >= 0.001 else ""
        size = "" if group.kind == "state" else f" ({group.block_size} tokens a block{note})"
        yield f"    {group.kind}{window}: layers {', '.join(map(str, group.layers))}{size}"
