"""A model cut over workers: each has an equal share of every layer's heads, feed-forward width and
experts.

How a leaf is cut follows from its role (parameters.py), the same for all families. What a worker
has is a smaller decoder, described by a spec of its own: its K/V, its weights and its products
follow from that. Embedding, head, norms and what is added after a sum stay whole on each worker.
Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from quire.errors import LoadError
from quire.models.parameters import Parameter
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
)

_SEGMENTS = (2, 4)
"""The number of segments that the inputs of a product form. Over as many workers, sums of parts
have the order of one.
"""

INPUTS_AT_ONCE = 4
"""Of a product, at least: a segment begins where they do."""

_AXIS = {"column": 0, "kv": 0, "row": 1}


def shard(decoder: Decoder, size: int, group: int = 0) -> Decoder:
    """What each of `size` workers has of a decoder whose weights have a scale for every `group`
    inputs (0: not). Raises LoadError for one that is not cut.
    """
    assert size > 1, "a part is less than the whole"
    blocks = tuple(_shard_block(block, i, size, group) for i, block in enumerate(decoder.blocks))
    return replace(decoder, blocks=blocks)


def num_segments(units: int, inputs: int, group: int = 0) -> int:
    """How many segments the inputs of a product form, each summed by itself (`ops/segments.py`):
    as many as the most workers, or fewer where these are not equal, between whole units (heads)
    and groups of inputs with one scale.
    """
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
    """Whether `size` workers that share this whole decoder add up every product in the order of
    one.
    """
    return all(
        num_segments(units, inputs, group) % size == 0
        for block in decoder.blocks
        for units, inputs in _cut_products(block)
    )


def _cut_products(block: Block) -> Iterator[tuple[int, int]]:
    """The units and inputs of each product of a layer whose inputs are shared."""
    if isinstance(block.mixer, Attention | LatentAttention):
        yield block.mixer.heads, block.mixer.heads * _value_dim(block.mixer)
    parts: list[FeedForward | None] = [block.mlp]
    if isinstance(block.mlp, DenseAndExperts):
        parts = [block.mlp.dense, block.mlp.experts]
    for part in parts:
        mlp = part.shared if isinstance(part, Moe) else part
        if isinstance(mlp, Mlp):
            yield mlp.width, mlp.width


def own_part(leaf: Parameter, rank: int, size: int) -> tuple[int, int, int] | None:
    """The axis along which a leaf of the whole decoder is cut, and where the part of one worker
    starts and how long it is; None for a leaf that every worker has whole.
    """
    axis = _AXIS.get(leaf.role)
    if axis is None:
        return None
    if leaf.role == "kv" and leaf.heads < size:
        length = leaf.shape[axis] // leaf.heads
        return axis, rank * leaf.heads // size * length, length
    length = leaf.shape[axis] // size
    return axis, rank * length, length


def _shard_block(block: Block, layer: int, size: int, group: int) -> Block:
    attn, mlp = block.mixer, block.mlp
    if not isinstance(attn, Attention | LatentAttention) or mlp is None:
        _refuse(layer, "has no attention, or no feed-forward part")
    if isinstance(attn, LatentAttention) and attn.indexer is not None:
        _refuse(layer, "attends to chosen tokens, where a part of the heads has other bits")
    if isinstance(attn, Attention) and not attn.is_causal and (attn.alibi or attn.distances):
        _refuse(layer, "adds numbers to scores that depend on distances")
    if isinstance(attn, Attention) and attn.gate == "per_head":
        _refuse(layer, "has one gate for each head, which workers do not share yet")
    if isinstance(attn, Attention) and attn.qk_norm_over == "heads_apart":
        _refuse(layer, "has a tensor for the norm of each head")
    counts = {"heads": attn.heads}
    if isinstance(attn, Attention):
        counts["key/value heads"] = attn.kv_heads
        if attn.kv_heads < size and attn.qk_norm is not None and attn.qk_norm_over != "head":
            _refuse(layer, "normalises each key head with weights of its own, and has few")
        if attn.qk_norm_over == "full" and (attn.qk_norm_after_rope or not attn.is_causal):
            _refuse(layer, "normalises whole rows after their rotation, or of whole prompts")
    for name, count in counts.items():
        repeats = name == "key/value heads" and size % count == 0
        if count % size and not repeats:
            _refuse(layer, f"has {count} {name}, which {size} workers cannot share equally")
    inputs = attn.heads * _value_dim(attn)
    _check_segments(layer, "attention output", attn.heads, inputs, size, group)
    mlp = _shard_feed_forward(mlp, layer, size, group)
    return replace(block, mixer=_shard_mixer(attn, size), mlp=mlp)


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
    _check_segments(layer, "feed-forward layer", mlp.width, mlp.width, size, group)
    return replace(mlp, width=mlp.width // size)


def _check_segments(layer: int, name: str, units: int, inputs: int, size: int, group: int) -> None:
    if group and inputs // size % group and num_segments(units, inputs, group) % size:
        _refuse(layer, f"has one scale for every {group} of the {inputs} inputs of its {name}")


def _value_dim(mixer: Attention | LatentAttention) -> int:
    """Numbers of a head that the output's product reads: with zeros where values are shorter."""
    return mixer.value_dim if isinstance(mixer, LatentAttention) else mixer.head_dim


def _shard_mixer(mixer: Attention | LatentAttention, size: int) -> Mixer:
    """A part of the heads, of which one of keys and values may be several workers'; latents are
    every worker's.
    """
    heads = mixer.heads // size
    if isinstance(mixer, LatentAttention):
        return replace(mixer, heads=heads)
    return replace(mixer, heads=heads, kv_heads=max(1, mixer.kv_heads // size))


def _refuse(layer: int, why: str) -> NoReturn:
    raise LoadError(f"Layer {layer} cannot be cut over several workers: it {why}.")
