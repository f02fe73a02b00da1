"""Values that several formats have in their part of config.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.storage import SMALLEST_GROUP

OF_AUTO_ROUND: tuple[str, ...] = (
    *("autoround_version", "provider", "to_quant_block_names", "enable_quanted_input"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "use_quant_input", "scale_dtype"),
    *("gradient_accumulate_steps", "iters", "lr", "minmax_lr", "low_gpu_mem_usage"),
    *("nsamples", "seqlen", "train_bs", "amp"),
)
"""What AutoRound adds to the keys of AWQ and GPTQ: how it was made."""

_MOST_PATTERN = 400
"""Characters of a regular expression in a config."""


def group_size(reader: ConfigReader, key: str, absent: int = -1) -> int | None:
    """A number of inputs with one scale; None for -1, all of them."""
    value = reader.integer(key, absent, minimum=-1)
    if value == -1:
        return None
    if value < 1 or value % SMALLEST_GROUP:
        raise unsupported(reader.at(key), value, f"-1 or a multiple of {SMALLEST_GROUP}")
    return int(value)


def cache_type(reader: ConfigReader) -> Literal["float", "int"] | None:
    """The type of keys and values in 8 bits that `kv_cache_scheme` asks for; the files have the
    scales, if there are any. None: it asks for none.
    """
    if reader.raw("kv_cache_scheme", None) == "static":  # all that older tools say
        return "float"
    scheme = reader.section("kv_cache_scheme")
    if scheme is None:
        return None
    scheme.choice_of("num_bits", 8)
    return scheme.choice("type", {"float": "float", "int": "int"})  # type: ignore[no-any-return]


def names(reader: ConfigReader, key: str) -> tuple[str, ...]:
    """A list of names; empty when absent."""
    value = reader.raw(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise unsupported(reader.at(key), value, "a list of names")
    return tuple(value)


def pattern(text: str, key: str) -> re.Pattern[str]:
    """A regular expression of a config, which matches from the beginning of a module's name."""
    try:
        if len(text) > _MOST_PATTERN:
            raise ValueError
        return re.compile(text)
    except (ValueError, re.error, RecursionError, OverflowError):
        allowed = f"a regular expression of at most {_MOST_PATTERN} characters"
        raise unsupported(key, text, allowed) from None


def has_segment(name: str, listed: Sequence[str]) -> bool:
    """Whether one of `listed` is within a module's name, as `modules_to_not_convert` means it."""
    return any(part in name for part in listed)
