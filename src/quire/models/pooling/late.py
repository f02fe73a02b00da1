"""Models of late interaction (ColBERT, Khattab & Zaharia 2020): each token has a vector, which is a
projection of its hidden state that the checkpoint holds beside the decoder.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import LARGEST_SIZE, ConfigReader, unsupported
from quire.models.pooling.spec import HeadLayer, PoolerSpec
from quire.models.reading.text_part import PART, Projection
from quire.models.reading.text_part import PROJECTION as OF_RETRIEVERS
from quire.models.rules import Family
from quire.models.spec import Attention, Block, Decoder

PROJECTION = "linear"
"""The projection's name in a checkpoint."""
_WIDTHS = ("colbert_dim", "projection_dim", "dim")
"""Keys of config.json for the numbers of a vector; `dim` is the hidden width of some models."""


def base_of(architecture: str) -> str | None:
    """The architecture that is projected, XModel of ColBERTXModel; None: it is not such a name."""
    if architecture == "HF_ColBERT":
        return "BertModel"
    base = architecture.removeprefix("ColBERT")
    return base if base != architecture and base.endswith("Model") else None


def projection(width: int) -> HeadLayer:
    """The layer that is stored as `PROJECTION`."""
    return HeadLayer(width, "identity", bias=False)


def _retriever(decoder: Decoder, found: Projection) -> Decoder:
    """The decoder with its projection. Raises UnsupportedConfigValue for an invalid width."""
    width = found.width
    if not isinstance(width, int) or not 0 < width <= LARGEST_SIZE:
        raise unsupported("embedding_dim", width, "a positive integer")
    layer = HeadLayer(width, "identity", module=found.module)
    if found.sees_all:
        decoder = replace(decoder, blocks=tuple(map(_seeing_all, decoder.blocks)))
    return replace(decoder, pooler=PoolerSpec(("token_embed",), dense=(layer,)))


def _seeing_all(block: Block) -> Block:
    assert isinstance(block.mixer, Attention), "Gemma has no other mixer"
    return replace(block, mixer=replace(block.mixer, is_causal=False))


def projected(family: Family) -> Family:
    """The family of such checkpoints; without a width in the config there is no layer yet."""
    describe = family.describe

    def describe_late(c: ConfigReader) -> Decoder:
        decoder = describe(c)
        assert decoder.pooler is not None, "the base pools"
        found = (c.raw(PART, None) or {}).get(OF_RETRIEVERS)
        if found is not None:
            return _retriever(decoder, Projection(*found))
        free = [key for key in _WIDTHS if key in c and not c.has_read(key)]
        widths = [c.integer(key, None) for key in free]
        dense = tuple(projection(width) for width in widths[:1] if width is not None)
        return replace(decoder, pooler=PoolerSpec(("token_embed",), dense=dense))

    return replace(family, describe=describe_late)


def is_unprojected(pooler: PoolerSpec) -> bool:
    """Whether it is the pooler of such a model, whose projection is not known yet."""
    return pooler.tasks == ("token_embed",) and not pooler.dense
