"""Models of late interaction (ColBERT, Khattab & Zaharia 2020): each token has a vector, which is a
projection of its hidden state that the checkpoint holds beside the decoder.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.pooling.spec import HeadLayer, PoolerSpec
from quire.models.rules import Family
from quire.models.spec import Decoder

PROJECTION = "linear"
"""The projection's name in a checkpoint."""
_WIDTHS = ("colbert_dim", "projection_dim", "dim")
"""Keys of config.json for the numbers of a vector; `dim` is the hidden width of some models."""


def base_of(architecture: str) -> str | None:
    """The architecture that is projected, XModel of ColBERTXModel; None: it is no such name."""
    if architecture == "HF_ColBERT":
        return "BertModel"
    base = architecture.removeprefix("ColBERT")
    return base if base != architecture and base.endswith("Model") else None


def projection(width: int) -> HeadLayer:
    """The layer that is stored as `PROJECTION`."""
    return HeadLayer(width, "identity", bias=False)


def projected(family: Family) -> Family:
    """The family of such checkpoints, of the family of what is projected. Where the config names no
    width, the pooler has no layer yet.
    """
    describe = family.describe

    def describe_late(c: ConfigReader) -> Decoder:
        decoder = describe(c)
        assert decoder.pooler is not None, "the base pools"
        free = [key for key in _WIDTHS if key in c and not c.has_read(key)]
        widths = [c.integer(key, None) for key in free]
        dense = tuple(projection(width) for width in widths[:1] if width is not None)
        return replace(decoder, pooler=PoolerSpec(("token_embed",), dense=dense))

    return replace(family, describe=describe_late)


def is_unprojected(pooler: PoolerSpec) -> bool:
    """Whether it is the pooler of such a model, whose projection is not known yet."""
    return pooler.tasks == ("token_embed",) and not pooler.dense
