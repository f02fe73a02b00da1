"""Sampling parameters from a model's generation_config.json (reference rule 12.13)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import UnknownParameter, UnsupportedConfigValue

_TAKEN = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Key of the file -> field of SamplingParams. All other keys of the file describe other engines."""


def sampling_defaults(file: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams from the file and, on top, from `override`.

    Raises UnknownParameter for a key of `override` that has no effect here, UnsupportedConfigValue
    for a value in the file that is not a number.
    """
    for key in override:
        if key not in _TAKEN and key != "eos_token_id":
            allowed = "override_generation_config takes " + ", ".join([*_TAKEN, "eos_token_id"])
            raise UnknownParameter(key, allowed)
    both = {**file, **override}
    taken = {key: both[key] for key in _TAKEN if both.get(key) is not None}
    for key, value in taken.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedConfigValue(f"generation config: {key}={value!r} is not a number.")
    return {_TAKEN[key]: value for key, value in taken.items()}


def eos_token_ids(file: Mapping[str, Any], override: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a generation by the generation config, in its order."""
    value = {**file, **override}.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise UnsupportedConfigValue(
                f"generation config: eos_token_id={value!r} is not an id or a list of ids."
            )
    return tuple(dict.fromkeys(ids))
