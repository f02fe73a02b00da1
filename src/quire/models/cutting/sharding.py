"""A model cut over workers: each has an equal share of every layer's heads, feed-forward width and
experts.

How a leaf is cut follows from its role (parameters.py), the same for all families. What a worker
has is a smaller decoder, described by a spec of its own: its K/V, its weights and its products
follow from that. Embedding, head, norms and what is added after a sum stay whole on each worker,
and so does a mixer or a feed-forward part whose parts would not give the bits of the whole, or that
nothing here knows to cut: every worker computes all of it. Only of the head's product each computes
a part (models/heads.py). Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

from quire.errors import LoadError
from quire.models.mixers.recurrent.spec import (
    ChannelDelta,
    GatedDelta,
    GatedLinear,
    Mamba2,
    ShortConv,
)
from quire.models.parameters import Parameter, parameters
from quire.models.spec import (
    Attention,
    Block,
    Decoder,
    DenseAndExperts,
    FeedForward,
    LatentAttention,
    Mixer,
    Mlp,
    Moe,
    ParallelMixers,
)

M = TypeVar("M", bound=Mixer)

_SEGMENTS = (2, 4)
"""The number of segments that the inputs of a product form. Over as many workers, sums of parts
have the order of one.
"""

INPUTS_AT_ONCE = 4
"""Inputs that a product takes at once, at least: a segment begins where they do."""


def shard(decoder: Decoder, size: int, group: int = 0) -> Decoder:
    """The share of each of `size` workers in a decoder whose weights have a scale for every `group`
    inputs (0: not). Raises LoadError for heads, widths or experts that so many cannot share.
    """
    # one worker keeps the spec itself, so that its plans are those of an engine without ranks
    assert size > 1, "a part is less than the whole"
    blocks = tuple(_shard_block(block, i, size, group) for i, block in enumerate(decoder.blocks))
    return replace(decoder, blocks=blocks)


def kept_whole(decoder: Decoder, size: int, group: int = 0) -> Mapping[str, list[int]]:
    """Reasons why parts of layers are whole on each of `size` workers, with the layers."""
    found: dict[str, list[int]] = {}
    for layer, block in enumerate(decoder.blocks):
        mixers = block.mixer.mixers if isinstance(block.mixer, ParallelMixers) else [block.mixer]
        reasons = [None if m is None else _why_whole(m, size, group) for m in mixers]
        reasons += [
            _why_whole_mlp(part, size, group)
            for part in _dense_parts(block)
            if part.width % size == 0
        ]
        for reason in dict.fromkeys(r for r in reasons if r is not None):
            found.setdefault(reason, []).append(layer)
    return found


def num_segments(units: int, inputs: int, group: int = 0) -> int:
    """Number of segments of the inputs of a product, each summed by itself (`ops/segments.py`):
    as many as the most workers, or fewer where these are not equal, between whole units (heads)
    and groups of inputs with one scale.
    """
    # a scale must not be torn, and kernels take four inputs at a time
    least = max(group, INPUTS_AT_ONCE)
    fitting = (n for n in reversed(_SEGMENTS) if units % n == 0 and inputs % (n * least) == 0)
    return next(fitting, 1)


def own_segments(units: int, inputs: int, group: int, size: int) -> int:
    """The number of segments that the inputs of one of `size` workers form, `units` and `inputs`
    being those of all: its share of the whole product's, or else one, which is added in the
    order of the ranks and not in that of one worker.
    """
    of_all = num_segments(units, inputs, group)
    return of_all // size if of_all % size == 0 else 1


def has_bits_of_one(decoder: Decoder, size: int, group: int = 0) -> bool:
    """Whether `size` workers that share this decoder add up every product in the order of one."""
    return all(
        num_segments(units, inputs, group) % size == 0
        for block in decoder.blocks
        for units, inputs in _cut_products(block, size, group)
    )


def _cut_products(block: Block, size: int, group: int) -> Iterator[tuple[int, int]]:
    """The units and inputs of each product of a layer whose inputs are shared."""
    mixer = block.mixer
    for one in mixer.mixers if isinstance(mixer, ParallelMixers) else [mixer]:
        if one is not None and _why_whole(one, size, group) is None:
            yield _output_of(one)
    for mlp in _dense_parts(block):
        if _why_whole_mlp(mlp, size, group) is None:
            yield mlp.width, mlp.width


def _dense_parts(block: Block) -> Iterator[Mlp]:
    """The dense networks of a layer's feed-forward part, which all tokens go through."""
    parts: list[FeedForward | None] = [block.mlp]
    if isinstance(block.mlp, DenseAndExperts):
        parts = [block.mlp.dense, block.mlp.experts]
    for part in parts:
        mlp = part.shared if isinstance(part, Moe) else part
        if isinstance(mlp, Mlp):
            yield mlp


@dataclass(frozen=True, slots=True)
class LeafPart:
    """The part of a leaf that a worker has: `runs` (where they start, how long they are) along
    `axis`. `count`: how many different parts there are, fewer than workers where several have the
    same heads.
    """

    axis: int
    runs: tuple[tuple[int, int], ...]
    count: int


def own_parts(decoder: Decoder, own: Decoder, rank: int, size: int) -> dict[str, LeafPart]:
    """The parts that a worker with the decoder `own` has of leaves that are cut, by name."""
    whole = parameters(decoder)
    found = {
        name: own_part(whole[name], leaf, rank, size) for name, leaf in parameters(own).items()
    }
    return {name: part for name, part in found.items() if part is not None}


def own_part(leaf: Parameter, own: Parameter, rank: int, size: int) -> LeafPart | None:
    """The part of a decoder's leaf that a worker has as `own`; None: it has all of it."""
    if leaf.shape == own.shape:
        return None
    if leaf.role == "row":
        length = own.shape[1]
        return LeafPart(1, ((rank * length, length),), size)
    assert leaf.role in ("column", "kv"), "what is whole on every worker"
    units = min(size, leaf.heads) if leaf.role == "kv" else size
    runs, before = [], 0
    for rows, count in leaf.sections or ((leaf.shape[0], units),):
        copies = max(1, size // count)
        length = rows * copies // size
        runs.append((before + rank // copies * length, length))
        before += rows
    assert sum(length for _, length in runs) == own.shape[0], f"a part of {leaf.name}"
    return LeafPart(0, tuple(runs), units)


def _shard_block(block: Block, layer: int, size: int, group: int) -> Block:
    mixer, mlp = block.mixer, block.mlp
    if isinstance(mixer, ParallelMixers):
        mixers = tuple(_shard_mixer(one, layer, size, group) for one in mixer.mixers)
        mixer = replace(mixer, mixers=mixers)
    elif mixer is not None:
        mixer = _shard_mixer(mixer, layer, size, group)
    if mlp is not None:
        mlp = _shard_feed_forward(mlp, layer, size, group)
    return replace(block, mixer=mixer, mlp=mlp)


def _shard_mixer(mixer: M, layer: int, size: int, group: int) -> M:
    """A part of the heads; keys and values may be several workers', latents are everyone's."""
    if isinstance(mixer, Attention | LatentAttention):
        _check_heads(mixer, layer, size)
    if _why_whole(mixer, size, group) is not None:
        return mixer
    if isinstance(mixer, Attention):
        kv_heads = max(1, mixer.kv_heads // size)
        return replace(mixer, heads=mixer.heads // size, kv_heads=kv_heads)
    if isinstance(mixer, GatedDelta):
        key_heads, value_heads = mixer.key_heads // size, mixer.value_heads // size
        return replace(mixer, key_heads=key_heads, value_heads=value_heads)
    if isinstance(mixer, Mamba2):
        groups, norms = max(1, mixer.groups // size), max(1, mixer.norm_groups // size)
        heads = mixer.heads // size
        return replace(mixer, heads=heads, groups=groups, norm_groups=norms)
    if isinstance(mixer, ShortConv):
        return replace(mixer, width=mixer.width // size)
    if isinstance(mixer, GatedLinear):
        blocks = mixer.gate_blocks // size
        return replace(mixer, width=mixer.width // size, gate_blocks=blocks)
    assert isinstance(mixer, LatentAttention | ChannelDelta), "what nothing keeps whole"
    return replace(mixer, heads=mixer.heads // size)


def _check_heads(attn: Attention | LatentAttention, layer: int, size: int) -> None:
    counts = {"heads": attn.heads}
    if isinstance(attn, Attention):
        counts["key/value heads"] = attn.kv_heads
    for name, count in counts.items():
        repeats = name == "key/value heads" and size % count == 0
        if count % size and not repeats:
            _refuse(layer, f"has {count} {name}, which {size} workers cannot share equally")


def _why_whole(mixer: Mixer, size: int, group: int) -> str | None:
    """The reason why each worker has all of a mixer with heads that could be cut; None if cut."""
    if isinstance(mixer, Attention):
        why = _why_whole_attention(mixer)
    elif isinstance(mixer, LatentAttention):
        why = None if mixer.indexer is None else "an attention to chosen tokens"
    else:
        why = _why_whole_state(mixer, size)
    if why is None and not _fits(*_output_of(mixer), size, group):
        why = f"a scale for every {group} inputs of a mixer's output"
    return why


def _why_whole_attention(a: Attention) -> str | None:
    if a.qk_norm is not None and a.qk_norm_over == "heads_apart":
        return "a tensor for the norm of each head"
    is_late = a.qk_norm_after_rope or not a.is_causal
    if a.qk_norm is not None and a.qk_norm_over == "full" and is_late:
        return "norms of whole rows after their rotation, or of whole prompts"
    if not a.is_causal and (a.alibi or a.distances):
        return "scores that depend on distances"
    return None


def _why_whole_state(mixer: Mixer, size: int) -> str | None:
    if isinstance(mixer, GatedDelta):
        fits = mixer.key_heads % size == mixer.value_heads % size == 0
    elif isinstance(mixer, ChannelDelta):
        fits = mixer.heads % size == 0
    elif isinstance(mixer, ShortConv):
        fits = mixer.width % size == 0
    elif isinstance(mixer, GatedLinear):
        fits = mixer.gate_blocks % size == 0
    elif isinstance(mixer, Mamba2):
        has_groups = mixer.groups % size == 0 or size % mixer.groups == 0
        has_norms = mixer.norm_eps is None or mixer.norm_groups % size == 0
        fits = mixer.heads % size == 0 and has_groups and has_norms
    else:
        return f"a mixer of the kind {type(mixer).__name__}"
    return None if fits else f"heads or groups of {type(mixer).__name__} that cannot be shared"


def _output_of(mixer: Mixer) -> tuple[int, int]:
    """The units of the product that ends a mixer which is cut, and its inputs."""
    if isinstance(mixer, GatedDelta):
        return mixer.value_heads, mixer.width
    if isinstance(mixer, ShortConv | GatedLinear):
        return mixer.width, mixer.width
    if isinstance(mixer, Mamba2 | ChannelDelta):
        return mixer.heads, mixer.width
    assert isinstance(mixer, Attention | LatentAttention), "what is whole has no part"
    return mixer.heads, mixer.heads * _value_dim(mixer)


def _shard_feed_forward(part: FeedForward, layer: int, size: int, group: int) -> FeedForward:
    """A part of the width of what all tokens go through; of experts, their spec as a whole, since a
    worker has some of them (feed_forward/mixture.py).
    """
    if isinstance(part, DenseAndExperts):
        dense, experts = (
            _shard_feed_forward(each, layer, size, group) for each in (part.dense, part.experts)
        )
        assert isinstance(dense, Mlp) and isinstance(experts, Moe)
        return replace(part, dense=dense, experts=experts)
    if isinstance(part, Moe):
        if part.experts < size:
            _refuse(layer, f"has {part.experts} experts, fewer than {size} workers")
        if part.shared is None:
            return part
        return replace(part, shared=_shard_dense(part.shared, layer, size, group))
    return _shard_dense(part, layer, size, group)


def _shard_dense(mlp: Mlp, layer: int, size: int, group: int) -> Mlp:
    if mlp.width % size:
        _refuse(layer, f"has {mlp.width} width, which {size} workers cannot share equally")
    if _why_whole_mlp(mlp, size, group) is not None:
        return mlp
    return replace(mlp, width=mlp.width // size)


def _why_whole_mlp(mlp: Mlp, size: int, group: int) -> str | None:
    if _fits(mlp.width, mlp.width, size, group):
        return None
    return f"a scale for every {group} of the {mlp.width} inputs of a feed-forward layer"


def _fits(units: int, inputs: int, size: int, group: int) -> bool:
    """Whether the inputs of a product can be cut: between those with one scale."""
    return (
        not group or inputs // size % group == 0 or num_segments(units, inputs, group) % size == 0
    )


def _value_dim(mixer: Attention | LatentAttention) -> int:
    """Numbers of a head that the output's product reads: with zeros where values are shorter."""
    return mixer.value_dim if isinstance(mixer, LatentAttention) else mixer.head_dim


def _refuse(layer: int, why: str) -> NoReturn:
    raise LoadError(f"Layer {layer} cannot be cut over several workers: it {why}.")
