"""AutoRound (Cheng et al. 2023): codes packed as in GPTQ or AWQ, with entries for modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.expressions import Expressions
from quire.models.formats.keys import OF_AUTO_ROUND, group_size, has_segment, names
from quire.models.formats.storage import CodeLayout, Storage

_GPTQ_1 = CodeLayout("gptq", 4, 128, has_zeros=True, is_one_less=True)
_GPTQ_2 = replace(_GPTQ_1, is_one_less=False)
_PACKINGS: Mapping[str, CodeLayout] = MappingProxyType(
    {
        **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq"), _GPTQ_1),
        **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), _GPTQ_2),
        **dict.fromkeys(("auto_round:exllamav2", "auto_round:tritonv2"), _GPTQ_2),
        **dict.fromkeys(
            ("auto_round:auto_awq", "auto_round:awq"), CodeLayout("awq", 4, 128, has_zeros=True)
        ),
    }
)
_IRRELEVANT = (
    # how it was made; the files say which modules have codes
    *("batch_size", "dataset", "block_name_to_quantize", "sym", "lm_head", "quant_lm_head"),
    *("super_bits", "super_group_size", "supported_types", "enable_alg_ext", "enable_adam"),
    *("momentum", "sampler", "not_use_best_mse", "dynamic_max_gap", "enable_quanted_input"),
)
_OF_ACTIVATIONS = ("act_group_size", "act_sym", "act_data_type", "act_dynamic")
_KEPT = (16, 32)
"""Bits of modules and activations that keep their values."""
_NAME = re.compile(r"[\w.-]+")
"""Keys of `extra_config` that are the names of modules; others are regular expressions."""


def read_auto_round(reader: ConfigReader) -> Storage:
    """Zero points are in the files, of symmetric codes too. A module's own entry counts before the
    first expression that is found in its name.
    """
    reader.rename(packing_format="backend")
    reader.ignore(*_IRRELEVANT, *OF_AUTO_ROUND)
    packing = reader.choice("packing_format", _PACKINGS, "auto_round:auto_gptq")
    layout = _layout(reader, packing)
    if layout is None:
        raise unsupported(reader.at("bits"), reader.raw("bits"), "4 or 8, with 16 for some modules")
    kept = names(reader, "modules_to_not_convert")
    own, found = _entries(reader, layout)

    def layout_of(module: str) -> CodeLayout | None:
        if module in own:
            return own[module]
        if has_segment(module, kept):
            return None
        return next((entry for pattern, entry in found if pattern.match(module)), layout)

    layouts = [layout, *own.values(), *(entry for _, entry in found)]
    group = max(one.group or 0 for one in layouts if one is not None)
    return Storage("auto-round", layout_of, is_decided_by_files=True, group=group)


def _entries(
    reader: ConfigReader, layout: CodeLayout
) -> tuple[dict[str, CodeLayout | None], list[tuple[re.Pattern[str], CodeLayout | None]]]:
    """Entries of `extra_config` for modules by their names, and for those whose names match."""
    section = reader.section("extra_config")
    if section is None:
        return {}, []
    entries: dict[str, CodeLayout | None] = {}
    for key in section.keys():  # noqa: SIM118
        entry = section.section(key)
        if entry is not None:
            entry.ignore("sym")
            entries[key] = _layout(entry, layout)
            entry.finish()
    section.finish()
    own = {key: entry for key, entry in entries.items() if _NAME.fullmatch(key)}
    others = [key for key in entries if key not in own]
    # found anywhere in a name, which is what most of them say themselves
    texts = [key if key.startswith((".*", "^")) else f".*(?:{key})" for key in others]
    compiled = Expressions().compile(texts, reader.at("extra_config"))
    return own, [(p, entries[key]) for p, key in zip(compiled, others, strict=True)]


def _layout(reader: ConfigReader, absent: CodeLayout) -> CodeLayout | None:
    """None: modules keep their values."""
    reader.ignore(*_OF_ACTIVATIONS, "scale_dtype", "super_bits", "super_group_size")
    reader.only("act_bits", *_KEPT)
    reader.only("data_type", "int", "float")
    group = group_size(reader, "group_size") if "group_size" in reader else absent.group
    allowed = (4,) if absent.packing == "awq" else (4, 8)
    bits = reader.choice_of("bits", *allowed, *_KEPT, absent=absent.bits)
    if bits in _KEPT:
        return None
    reader.only("data_type", "int")
    return replace(absent, bits=bits, group=group)
