"""Sampling parameters from a model's generation_config.json (reference rule 12.13)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError, UnknownParameter, UnsupportedConfigValue
from quire.models.config_reader import token_ids, unsupported
from quire.params import SamplingParams

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
    for a value that SamplingParams does not take.
    """
    for key in override:
        if key not in _TAKEN and key != "eos_token_id":
            allowed = "override_generation_config takes " + ", ".join([*_TAKEN, "eos_token_id"])
            raise UnknownParameter(key, allowed)
    both = {**file, **override}
    taken = {key: both[key] for key in _TAKEN if both.get(key) is not None}
    for key, value in taken.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise unsupported(key, value, "a number", "generation config")
    defaults = {_TAKEN[key]: value for key, value in taken.items()}
    try:
        # made once here, so that a bad file is a failure of the start and not of each request
        SamplingParams(**defaults)
    except RequestError as error:
        raise UnsupportedConfigValue(
            f"generation config: {error} Replace it with override_generation_config, or take "
            f"nothing from the model with generation_config='quire'."
        ) from error
    return defaults


def eos_token_ids(
    file: Mapping[str, Any], override: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """The ids that end a generation by the generation config, in its order. Raises
    UnsupportedConfigValue for what is not an id of the vocabulary.
    """
    value = {**file, **override}.get("eos_token_id")
    return tuple(dict.fromkeys(token_ids("eos_token_id", value, vocab_size, "generation config")))
