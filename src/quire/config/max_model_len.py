"""How long a model's contexts may be, by its config.json (reference rule 12.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.config.facts import ModelLength
from quire.errors import UnsupportedConfigValue

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
_SCALED_ALREADY = ("default", "yarn", "llama3", "longrope", "su", "mrope")
"""Scalings whose factor the declared number of positions contains already."""


def model_length(config: Mapping[str, Any]) -> ModelLength:
    """The limit and the default of `config`, with the key they come from.

    The default is shorter than the limit where a longer one would change the answers to short
    prompts: dynamic and longrope scaling pick their frequencies by the length that is served.
    """
    if isinstance(config.get("model_max_length"), int):
        limit = int(config["model_max_length"])
        return ModelLength(limit, limit, "model_max_length of config.json")
    found = {key: config[key] for key in _KEYS if isinstance(config.get(key), int)}
    if not found:
        return ModelLength(None, None, "config.json names no length")
    key = min(found, key=lambda name: found[name])
    return _scaled(found[key], f"{key} of config.json", config)


def _scaled(length: int, source: str, config: Mapping[str, Any]) -> ModelLength:
    gemma3 = str(config.get("model_type", "")).startswith("gemma3")
    for rope in _rope_objects(config):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind in ("longrope", "su"):
            original = config.get("original_max_position_embeddings") or rope.get(
                "original_max_position_embeddings"
            )
            return ModelLength(
                length, original or length, f"{source}; longrope before its long form"
            )
        if kind in _SCALED_ALREADY or gemma3:
            continue
        limit = int(length * _factor(rope))
        if kind == "dynamic":
            return ModelLength(limit, length, f"{source}, up to which dynamic RoPE is unscaled")
        return ModelLength(limit, limit, f"{source} times the RoPE factor {rope['factor']:g}")
    return ModelLength(length, length, source)


def _rope_objects(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rope objects of old files, of new ones, and of new ones with one per layer type."""
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if not isinstance(value, Mapping):
            continue
        inner = [part for part in value.values() if isinstance(part, Mapping)]
        yield from inner or [value]


def _factor(rope: Mapping[str, Any]) -> float:
    factor = rope.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 1:
        raise UnsupportedConfigValue(f"config.json: RoPE factor={factor!r} is not a number >= 1.")
    return float(factor)
