"""A decoder cut into pieces that are loaded each by itself, so that new weights take no more memory
than the layers that are on their way. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.models.drafting.spec import DraftDecoder
from quire.models.spec import (
    Attention,
    Block,
    Decoder,
    LatentAttention,
    MixerAfterShared,
    PipelineStage,
    learned_rope,
    shared_distances,
    single_mixers,
)


def pieces_of(decoder: Decoder) -> list[Decoder]:
    """Decoders that have together each leaf of this one once, under its name: what comes before
    the layers, each layer, and what comes after them. One whose layers share weights is one piece.
    """
    return list(_pieces(decoder)) if _can_be_cut(decoder) else [decoder]


def _pieces(d: Decoder) -> Iterator[Decoder]:
    first, count = d.first_layer, d.first_layer + len(d.blocks) + 1
    has_tied_head = d.embeds and d.generates and d.tie
    if d.embeds:
        stage = None if has_tied_head else PipelineStage(0, 0, count)
        yield replace(d, blocks=(), final_norm=None, stage=stage)
    elif d.lends_table and not (d.tie and d.generates):
        stage = PipelineStage(first, first, count, has_ends=False, lends_table=True)
        yield replace(_without_entrance(d), blocks=(), final_norm=None, stage=stage)
    for layer, block in enumerate(d.blocks, first):
        stage = PipelineStage(layer, layer + 1, count, has_ends=False)
        yield replace(_without_entrance(d), blocks=(block,), final_norm=None, stage=stage)
    end = count - 1
    if has_tied_head and d.final_norm is not None:
        yield replace(_without_entrance(d), blocks=(), stage=PipelineStage(end, end, count))
    elif d.is_last and not has_tied_head:
        stage = PipelineStage(end, end, end, lends_table=d.lends_table and d.tie)
        yield replace(_without_entrance(d), blocks=(), stage=stage)


def _without_entrance(d: Decoder) -> Decoder:
    return replace(
        d, learned_positions=0, position_offset=0, embed_norm=None, token_types=0, embed_width=None
    )


def _can_be_cut(d: Decoder) -> bool:
    has_own_ends = d.pooler is None and d.streams is None and d.layer_inputs is None
    if isinstance(d, DraftDecoder) or not has_own_ends or shared_distances(d) is not None:
        return False
    if learned_rope(d) is not None:
        return False
    return not any(_reads_another(block) for block in d.blocks)


def _reads_another(block: Block) -> bool:
    """Whether a layer has weights, or keys and values, of another one."""
    if block.repeats is not None or isinstance(block.mixer, MixerAfterShared):
        return True
    mixers = single_mixers(block.mixer)
    return any(isinstance(m, Attention | LatentAttention) and m.shares is not None for m in mixers)
