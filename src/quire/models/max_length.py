"""The maximum length of a request according to the length keys of config.json.

The rules are those of the reference engine, so that a model has the same limit there and here. Free
of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.models.config_reader import LARGEST_SIZE, unsupported

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# rope types whose config already declares the extended length
_NOT_MULTIPLIED = frozenset(("default", "yarn", "llama3", "longrope", "su", "mrope"))


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """The lengths in a config, in tokens of prompt and output together. `limit` is the most that a
    user may request, `default` applies without a request; both are None if the config has no
    length. `source` names the keys that decided.
    """

    limit: int | None
    default: int | None
    source: str


def length_facts(config: Mapping[str, Any]) -> LengthFacts:
    """The length limit and default of a model. `model_max_length` replaces the other keys. Raises
    UnsupportedConfigValue for what is not a length.
    """
    for key in ("model_max_length", *_KEYS):
        _check(key, config.get(key))
    if (stated := _length(config.get("model_max_length"))) is not None:
        return LengthFacts(stated, stated, "model_max_length")
    found = {key: n for key in _KEYS if (n := _length(config.get(key))) is not None}
    if not found:
        return LengthFacts(None, None, "no length key in config.json")
    key = min(found, key=lambda name: found[name])
    return _scaled(found[key], key, config)


def bounded(found: LengthFacts, positions: int | None) -> LengthFacts:
    """The lengths of a model that knows so many positions; None: of one that sets no bound."""
    if positions is None or (found.limit is not None and found.limit <= positions):
        return found
    default = positions if found.default is None else min(found.default, positions)
    return LengthFacts(positions, default, f"positions of the model, fewer than {found.source}")


def _scaled(length: int, key: str, config: Mapping[str, Any]) -> LengthFacts:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or str(config.get("model_type", "")).startswith("gemma3"):
        return LengthFacts(length, length, key)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("longrope", "su"):
        return LengthFacts(length, _original(config, rope, length), f"{key}, rope {kind}")
    factor = rope.get("factor")
    if kind in _NOT_MULTIPLIED or isinstance(factor, bool) or not isinstance(factor, int | float):
        return LengthFacts(length, length, key)
    if not 0 < length * factor <= LARGEST_SIZE:
        allowed = f"a factor with which {key}={length} is at most {LARGEST_SIZE}"
        raise unsupported("factor", factor, allowed)
    scaled = int(length * factor)
    return LengthFacts(scaled, scaled, f"{key} times the {kind} rope factor {factor:g}")


def _original(config: Mapping[str, Any], rope: Mapping[str, Any], length: int) -> int:
    """The length before LongRoPE's extension, up to which its short factors hold."""
    for place in (config, rope):
        if (stated := _length(place.get("original_max_position_embeddings"))) is not None:
            return min(stated, length)
    return length


def _check(key: str, value: object) -> None:
    """Raise UnsupportedConfigValue for what is not a length, as the text "8192"."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise unsupported(key, value, "a positive number of tokens, or null")


def _length(value: object) -> int | None:
    """A usable length: some files have floats, or a huge number that means no limit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 < value <= LARGEST_SIZE else None
