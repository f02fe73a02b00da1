"""From the config.json of a draft network to what it is. Free of torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import LoadError
from quire.models.drafting.eagle import read_eagle, read_eagle3
from quire.models.drafting.mtp import read_mtp
from quire.models.drafting.network import DraftNetwork
from quire.models.drafting.spec import DraftDecoder
from quire.models.families import find_family, read_spec
from quire.models.spec import Decoder

POOLED_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""The methods whose networks have layers in the target's pool."""


def read_network(
    method: str, config: Mapping[str, Any], target: Decoder, names: Collection[str]
) -> DraftNetwork:
    """The network of a method ("draft_model", "eagle", "eagle3", "mtp") with this config.json,
    for a target; its files have tensors of these `names`. What its layers remember does not depend
    on these. Raises LoadError or NotBuiltYet for what cannot be run.
    """
    if method == "draft_model":
        network = DraftNetwork(read_spec(config), find_family(config))
    elif method == "mtp":
        network = read_mtp(config, target, find_family(config))
    else:
        network = (read_eagle if method == "eagle" else read_eagle3)(config, target, names)
    _check(network.spec, target)
    return network


def _check(spec: Decoder, target: Decoder) -> None:
    """Refuse what cannot draft for the target."""
    if not isinstance(spec, DraftDecoder) and spec.vocab != target.vocab:
        raise LoadError(
            f"The draft has {spec.vocab} token ids and the model {target.vocab}: drafts need the "
            "tokenizer of the model."
        )
    if any(memory is not None and memory.kind == "state" for memory in spec.memories):
        raise LoadError(
            "A draft with recurrent layers is not supported: its state cannot go back to before a "
            "wrong token."
        )
