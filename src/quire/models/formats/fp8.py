"""Weights in 8-bit floats (e4m3): those of DeepSeek and others with scales of blocks or of whole
tensors, and those of NVIDIA's ModelOpt, whose floats may also have four bits, as those of gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.keys import cache_type
from quire.models.formats.storage import (
    SMALLEST_GROUP,
    CodeLayout,
    RowScheme,
    Storage,
    skipped_rounding,
)

INVERSE_SCALE, SHORT_SCALE = "weight_scale_inv", "scale"
"""Names of scales of blocks, the second in files of DeepSeek-V4."""

_SCHEMES = {"dynamic": False, "static": True}
"""Name of a scheme of activations -> whether their scale is stored."""

_MODULES = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")
"""Lists of modules that are stored as they are; the files say so, too."""


def read_fp8(reader: ConfigReader) -> Storage:
    """Weights have a scale for each block of outputs and inputs, or one in all."""
    reader.ignore(*_MODULES, "scale_fmt")  # how scales were rounded, which are numbers like others
    reader.only("fmt", "e4m3", "float8_e4m3fn")
    reader.only("store_dtype", "fp8")
    reader.only("dequantize", False)
    is_static = reader.choice("activation_scheme", _SCHEMES, "dynamic")
    block = read_block(reader, "weight_block_size")
    cache, experts = cache_type(reader), _read_experts(reader)
    if block is None:
        if experts is not None:
            raise unsupported(reader.at("weight_block_size"), None, "a block next to such experts")
        return replace(_storage("fp8", _whole(is_static)), cache=cache)
    if is_static:
        raise unsupported(reader.at("activation_scheme"), "static", "'dynamic' for blocks")
    outputs, inputs = block
    layout = floats(inputs, outputs, RowScheme(inputs), INVERSE_SCALE)
    return replace(_with_experts(_storage("fp8", layout), layout, experts), cache=cache)


def _read_experts(reader: ConfigReader) -> CodeLayout | None:
    """The layout of experts in four bits (DeepSeek-V4); None: they are as the rest."""
    kinds = {"fp8": None, "fp4": CodeLayout("deepseek-mxfp4", 4, 32, has_zeros=False)}
    layout: CodeLayout | None = reader.choice("expert_dtype", kinds, "fp8")
    if "moe_quant_algo" not in reader:
        return layout
    layout = reader.choice("moe_quant_algo", {"NVFP4": replace(_NVFP4, skips_rows=True)})
    reader.only("quant_algo", _MIXED)
    reader.only("group_size", _NVFP4.group)
    reader.only("kv_cache_quant_algo", None)
    reader.ignore("producer", "config_groups", "quantized_layers")  # which say the same
    return layout


def _with_experts(storage: Storage, layout: CodeLayout, experts: CodeLayout | None) -> Storage:
    if experts is None:
        return storage
    return replace(
        storage,
        layout_of=lambda module: experts if _EXPERT.search(module) else layout,
        skipped_rounding=skipped_rounding([experts]) or "of experts to 8 bits",
    )


_EXPERT = re.compile(r"\.experts\.\d+\.")


def read_modelopt(reader: ConfigReader) -> Storage:
    """The schemes of ModelOpt with floats of 8 and 4 bits; activations of the latter keep their
    values. All but the tool's name may be in an object `quantization`, as in hf_quant_config.json.
    """
    reader.ignore("producer")
    inner = reader.section("quantization")
    if inner is None:
        return _read_scheme(reader)
    return _read_scheme(inner)


def _read_scheme(reader: ConfigReader) -> Storage:
    reader.ignore(*_MODULES, "config_groups", "group_size")
    if reader.raw("quant_algo", None) != _MIXED:
        reader.ignore("quantized_layers")
    reader.only("has_zero_point", False)
    reader.only("pre_quant_scale", False)
    reader.only("kv_cache_quant_algo", "FP8")
    cache = cache_type(reader)
    if "kv_cache_quant_algo" in reader:
        cache = "float"
    layout = reader.choice("quant_algo", {**_ALGORITHMS, _MIXED: None})
    if layout is not None:
        storage = _storage("modelopt", layout)
        layouts = [layout]
    else:
        by_name = _layers(reader)
        layouts = list(by_name.values())
        group = max(layout.group or 0 for layout in layouts)
        storage = Storage(
            "modelopt", _finder(by_name), is_decided_by_files=True, group=group, lists_codes=True
        )
    return replace(storage, skipped_rounding=skipped_rounding(layouts), cache=cache)


def _layers(reader: ConfigReader) -> dict[str, CodeLayout]:
    """The layout of each module that mixed precision names."""
    section = reader.section("quantized_layers")
    if section is None:
        raise unsupported(reader.at("quantized_layers"), {}, "an object of algorithms by module")
    found = {}
    for name in section.keys():  # noqa: SIM118
        layer = section.section(name)
        if layer is None:
            raise unsupported(section.at(name), {}, "an object with quant_algo")
        found[name] = layer.choice("quant_algo", _ALGORITHMS)
        layer.only("group_size", found[name].group)
        layer.ignore("kv_cache_quant_algo", "has_zero_point", "pre_quant_scale")
    return found


def _finder(by_name: Mapping[str, CodeLayout]) -> Callable[[str], CodeLayout | None]:
    """Return the function that finds the layout of a module, or of the nearest one around it."""

    def layout_of(module: str) -> CodeLayout | None:
        while module:
            if module in by_name:
                return by_name[module]
            module = module.rpartition(".")[0]
        return None

    return layout_of


def read_mxfp4(reader: ConfigReader) -> Storage:
    """Experts in 4-bit floats, as gpt-oss is published; no other module is quantised."""
    reader.ignore(*_MODULES, "swizzle")
    reader.only("dequantize", False)
    layout = CodeLayout("gpt-oss", 4, 32, has_zeros=False)
    return Storage("mxfp4", lambda _: None, is_decided_by_files=True, group=32, experts=layout)


def floats(
    group: int | None, outputs: int | None, rows: RowScheme | None, name: str = "weight_scale"
) -> CodeLayout:
    """The layout of weights in e4m3."""
    return CodeLayout(
        "floats", 8, group, has_zeros=False, outputs=outputs, scale_name=name, rows=rows
    )


def read_block(reader: ConfigReader, key: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block with one scale."""
    value = reader.raw(key, None)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)
    if not is_pair or min(value) < 1 or value[1] % SMALLEST_GROUP:
        allowed = f"[outputs, inputs] of a block, inputs a multiple of {SMALLEST_GROUP}"
        raise unsupported(reader.at(key), value, allowed)
    return value[0], value[1]


def _whole(is_static: bool) -> CodeLayout:
    return floats(None, None, RowScheme(is_static=is_static))


_MIXED = "MIXED_PRECISION"
_NVFP4 = CodeLayout("modelopt-nvfp4", 4, 16, has_zeros=False)
_ALGORITHMS: Mapping[str, CodeLayout] = MappingProxyType(
    {
        "FP8": _whole(is_static=True),
        "FP8_PER_CHANNEL_PER_TOKEN": floats(None, 1, RowScheme()),
        "MXFP8": replace(floats(32, 1, None), skips_rows=True),
        "NVFP4": replace(_NVFP4, skips_rows=True),
        "W4A16_NVFP4": _NVFP4,
    }
)
"""ModelOpt's name -> how weights are stored."""


def _storage(method: str, layout: CodeLayout) -> Storage:
    return Storage(method, lambda _: layout, is_decided_by_files=True, group=layout.group or 0)
