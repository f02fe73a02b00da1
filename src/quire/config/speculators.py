"""A draft network in the layout of the "speculators" library that is given as the model: what it
was made for, its verifier, is the model then, and the network drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.args.engine_options import EngineOptions
from quire.errors import LoadError

_KEY = "speculators_config"


def is_speculator(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a network that drafts, in this layout."""
    return config.get(_KEY) is not None


def verifier_of(
    model: str, config: Mapping[str, Any], args: EngineOptions
) -> tuple[str, dict[str, Any]]:
    """The verifier of the network that was given as the `model`, and whose config.json this is,
    and `speculative_config` with the network. Keys that were given count, but for method and
    model. Raises LoadError for a config that does not name the verifier.
    """
    verifier = _at(config, _KEY, "verifier", "name_or_path")
    if not isinstance(verifier, str) or not verifier:
        raise LoadError(
            f"{model} is a network that drafts, and its config.json does not name the model "
            f"that it drafts for ({_KEY}.verifier.name_or_path). Give the model, and the network "
            "as speculative_config['model']."
        )
    given = {key.replace("-", "_"): value for key, value in (args.speculative_config or {}).items()}
    own = {"method": config.get("speculators_model_type"), "model": model}
    # the revision that was given is the network's: it was named as the model
    if args.revision is not None:
        own["revision"] = args.revision
    return verifier, given | own


def proposed_tokens(config: Mapping[str, Any]) -> int | None:
    """Number of tokens that such a network was made to draft; None where its config is silent."""
    methods = _at(config, _KEY, "proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    found = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return found if type(found) is int and found > 0 else None


def _at(config: Any, *keys: str) -> Any:
    """The value behind some keys; None where one is missing."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config
