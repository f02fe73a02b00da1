"""Values that several formats have in their part of config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.expressions import Expressions
from quire.models.formats.storage import SMALLEST_GROUP

OF_AUTO_ROUND: tuple[str, ...] = (
    *("autoround_version", "provider", "to_quant_block_names", "enable_quanted_input"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "use_quant_input", "scale_dtype"),
    *("gradient_accumulate_steps", "iters", "lr", "minmax_lr", "low_gpu_mem_usage"),
    *("nsamples", "seqlen", "train_bs", "amp"),
)
"""Keys that AutoRound adds to those of AWQ and GPTQ: how it was made."""

OF_CALIBRATION = ("observer", "observer_kwargs")
"""Keys about the way in which compressed-tensors found scales."""

_MOST_NAMES = 100_000
"""Most names on a list; a mixture's experts may be named one by one."""


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
    if reader.raw("kv_cache_scheme", None) in ("static", "FP8"):  # all that older tools say
        return "float"
    scheme = reader.section("kv_cache_scheme")
    if scheme is None:
        return None
    scheme.ignore(*OF_CALIBRATION)
    scheme.choice_of("num_bits", 8)
    found: Literal["float", "int"] = scheme.choice("type", {"float": "float", "int": "int"})
    scheme.only("strategy", "tensor")
    scheme.only("symmetric", True)
    scheme.only("dynamic", False)
    for key in ("group_size", "block_structure", "actorder"):
        scheme.only(key)
    check_types(scheme)
    return found


def check_types(args: ConfigReader) -> None:
    """Refuse other types of scales and zero points than files of compressed-tensors have."""
    args.only("scale_dtype", "torch.float16", "torch.bfloat16", "torch.float32")
    args.only("zp_dtype", "torch.int8")


def names(reader: ConfigReader, key: str) -> tuple[str, ...]:
    """A list of names; empty when absent."""
    value = reader.raw(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise unsupported(reader.at(key), value, "a list of names")
    if len(value) > _MOST_NAMES:
        raise unsupported(reader.at(key), value, f"a list of at most {_MOST_NAMES} names")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Names of modules, and expressions that match others."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def have(self, module: str) -> bool:
        return module in self.names or any(p.match(module) for p in self.patterns)


def module_names(listed: Iterable[str], key: str, expressions: Expressions) -> ModuleNames:
    """Names of modules on a list of `key`, on which expressions begin with `re:`."""
    listed = tuple(listed)
    texts = [name.removeprefix("re:") for name in listed if name.startswith("re:")]
    return ModuleNames(frozenset(listed), expressions.compile(texts, key))


def has_segment(name: str, listed: Sequence[str]) -> bool:
    """Whether one of `listed` is within a module's name, as `modules_to_not_convert` means it."""
    return any(part in name for part in listed)
