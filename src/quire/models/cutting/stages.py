"""A model cut between layers: each stage has some of them, and reads the hidden states that the
stage before has left.

What a stage has is a decoder of its own, with the names that its leaves have in the whole one. The
first stage embeds, the last one has the final norm and the head or pooler. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NoReturn

from quire.errors import LoadError
from quire.models.spec import (
    Attention,
    Block,
    Decoder,
    LatentAttention,
    Mixer,
    MixerAfterShared,
    PipelineStage,
)


def stages_of(decoder: Decoder, sizes: Sequence[int]) -> list[PipelineStage]:
    """The stages of a decoder with so many layers each. Raises LoadError for other counts."""
    count = len(decoder.blocks)
    if sum(sizes) != count or min(sizes) < 1:
        raise LoadError(
            f"Stages of {', '.join(map(str, sizes))} layers are not the {count} layers of this "
            "model: give each stage one layer or more, and together all."
        )
    ends = accumulate(sizes, initial=0)
    pairs = enumerate(pairwise(ends))
    return [PipelineStage(first, last, count, number) for number, (first, last) in pairs]


def cut(decoder: Decoder, stage: PipelineStage) -> Decoder:
    """A stage's part of a decoder. Raises LoadError where it needs more than hidden states."""
    assert decoder.stage is None and stage.count == len(decoder.blocks)
    if decoder.streams is not None or decoder.layer_inputs is not None:
        _refuse("its layers read several streams, or inputs of their own")
    own = [
        _moved(block, number, stage.first)
        for number, block in enumerate(decoder.blocks[: stage.last])
        if number >= stage.first
    ]
    _check_choice(own, stage.first)
    piece = replace(decoder, blocks=tuple(own), stage=stage)
    if not piece.is_last:
        piece = replace(piece, final_norm=None, pooler=None)
    if not piece.embeds:
        piece = replace(
            piece, learned_positions=0, position_offset=0, embed_norm=None, token_types=0,
            embed_width=None,
        )  # fmt: skip
    return piece


def memory_places(decoder: Decoder, stage: PipelineStage) -> range:
    """The places that the memories of a stage's layers have among those of the whole decoder."""
    counts = [len(block.memories) for block in decoder.blocks]
    return range(sum(counts[: stage.first]), sum(counts[: stage.last]))


def _moved(block: Block, number: int, first: int) -> Block:
    """A block whose earlier layers are counted from the stage's `first`."""
    mixer, repeats = block.mixer, block.repeats
    if isinstance(mixer, MixerAfterShared):
        _refuse("its layers share a transformer that reads the embedding")
    if repeats is not None:
        repeats = _counted(repeats, number, first, "runs with the weights")
    if isinstance(mixer, Attention | LatentAttention) and mixer.shares is not None:
        what = "keys and values" if isinstance(mixer, Attention) else "latents"
        source = _counted(mixer.shares, number, first, f"reads the {what}")
        mixer = _sharing(mixer, source)
    return replace(block, mixer=mixer, repeats=repeats)


def _check_choice(blocks: Sequence[Block], first: int) -> None:
    """Refuse a stage that begins with layers which take the choice of an earlier indexer."""
    mixers = (block.mixer for block in blocks)
    indexers = (mixer.indexer for mixer in mixers if isinstance(mixer, LatentAttention))
    indexer = next((found for found in indexers if found is not None), None)
    if indexer is not None and indexer.is_shared:
        _refuse(f"layer {first} attends to tokens that a layer of an earlier stage chooses")


def _sharing(mixer: Attention | LatentAttention, layer: int) -> Mixer:
    return replace(mixer, shares=layer)


def _counted(layer: int, number: int, first: int, what: str) -> int:
    if layer < first:
        _refuse(f"layer {number} {what} of layer {layer}, which would be in an earlier stage")
    return layer - first


def _refuse(why: str) -> NoReturn:
    raise LoadError(f"This model cannot be cut into these stages: {why}. Use one stage.")
