"""AMD's Quark: FP8 and int8 with scales per tensor or output, MXFP4, four bits in groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.expressions import Expressions
from quire.models.formats.fp8 import floats
from quire.models.formats.keys import group_size, names
from quire.models.formats.storage import CodeLayout, RowScheme, Storage, skipped_rounding

_OF_MAKING = (
    # how numbers were found
    *("observer_cls", "round_method", "scale_calculation_mode", "scale_type", "zero_point_type"),
    *("enable_buffer_reuse", "max_input_numel", "is_mse", "quant_lower_bound", "range_estimator"),
)
_IRRELEVANT = (
    *("algo_config", "quant_mode", "version", "kv_cache_post_rope", "pre_quant_opt_config"),
    *("log_severity_level", "quant_flow", "min_bits"),
)


def read_quark(reader: ConfigReader) -> Storage:
    """A scheme for all linear modules, others by patterns of names, and modules that are kept."""
    reader.ignore(*_IRRELEVANT)
    for key in ("layer_type_quant_config", "kv_cache_quant_config"):
        reader.only(key, {})
    reader.only("softmax_quant_spec")
    kept = names(reader, "exclude")
    packing, expressions = _packing(reader), Expressions()
    overall = _scheme(reader, "global_quant_config", packing)
    section = reader.section("layer_quant_config")
    own: list[tuple[Callable[[str], bool], CodeLayout | None]] = []
    for pattern in () if section is None else section.keys():
        assert section is not None, "its keys were read"
        matches = _matcher(section.at(pattern), pattern, expressions)
        own.append((matches, _scheme(section, pattern, packing)))
    excluded = [_matcher(reader.at("exclude"), name, expressions) for name in kept]

    def layout_of(module: str) -> CodeLayout | None:
        if any(matches(module) for matches in excluded):
            return None
        return next((layout for matches, layout in own if matches(module)), overall)

    layouts = [layout for layout in (overall, *(one for _, one in own)) if layout is not None]
    if not layouts:
        raise unsupported(reader.at("global_quant_config"), None, "a scheme with weights")
    return Storage(
        "quark",
        layout_of,
        is_decided_by_files=True,
        group=max(layout.group or 0 for layout in layouts),
        skipped_rounding=skipped_rounding(layouts),
    )


def _packing(reader: ConfigReader) -> bool:
    """Whether the outputs in a word are in AWQ's order."""
    export = reader.section("export")
    if export is None:
        return True
    export.ignore("min_kv_scale", "weight_merge_groups")
    export.only("kv_cache_group", [])
    export.only("weight_format", "real_quantized")
    return bool(export.choice("pack_method", {"reorder": True, "order": False}, "reorder"))


def _matcher(key: str, pattern: str, expressions: Expressions) -> Callable[[str], bool]:
    """Whether a module has this name, fits a shell's pattern, or the expression after `re:`."""
    if pattern.startswith("re:"):
        text = pattern.removeprefix("re:")
    else:
        text = ".*".join(map(re.escape, pattern.split("*"))) + "$"
    [compiled] = expressions.compile([text], key)
    return lambda module: compiled.match(module) is not None


def _scheme(reader: ConfigReader, key: str, is_reordered: bool) -> CodeLayout | None:
    """The layout of weights that a scheme is of; None: they keep their values."""
    section = reader.section(key)
    if section is None:
        return None
    for other in ("output_tensors", "bias"):
        section.only(other)
    section.ignore("target_device")
    weight, rows = section.section("weight"), section.section("input_tensors")
    if weight is None:
        if rows is not None:
            raise unsupported(section.at("weight"), None, "how weights are quantised")
        return None
    _check(weight, is_dynamic=False)
    dtype = weight.choice("dtype", _DTYPES)
    if dtype == "mx":
        return _microscaled(weight, rows)
    if dtype == "nibbles":
        return _nibbles(weight, rows, is_reordered)
    channel = {"per_tensor": None, "per_channel": 1}
    outputs = weight.choice("qscheme", channel)
    weight.only("ch_axis", 0)
    weight.only("symmetric", True)
    scheme = None if rows is None else _rows(rows, weight.raw("dtype"))
    if dtype == "floats":
        return floats(None, outputs, scheme)
    return CodeLayout("bytes", 8, None, has_zeros=True, outputs=outputs, rows=scheme)


_DTYPES = {
    "fp8_e4m3": "floats",
    "int8": "bytes",
    "fp4": "mx",
    "int4": "nibbles",
    "uint4": "nibbles",
}


def _check(tensor: ConfigReader, *, is_dynamic: bool | None) -> None:
    tensor.ignore(*_OF_MAKING)
    tensor.only("is_scale_quant", False)
    tensor.only("block_size")
    tensor.only("mx_element_dtype", "fp4")
    if is_dynamic is not None:
        tensor.only("is_dynamic", is_dynamic)


def _microscaled(weight: ConfigReader, rows: ConfigReader | None) -> CodeLayout:
    """Weights in e2m1 whose scales are powers of two; activations keep their values."""
    weight.only("scale_format", "e8m0")
    weight.only("qscheme", "per_group")
    weight.choice_of("group_size", 32)
    weight.only("ch_axis", -1, 1)
    weight.ignore("symmetric")
    if rows is not None:
        rows.ignore(*rows.keys())
        rows.choice_of("dtype", "fp4")
    return CodeLayout("quark-mxfp4", 4, 32, has_zeros=False, skips_rows=rows is not None)


def _nibbles(weight: ConfigReader, rows: ConfigReader | None, is_reordered: bool) -> CodeLayout:
    if rows is not None:
        raise unsupported(weight.at("dtype"), weight.raw("dtype"), "8 bits with input_tensors")
    weight.only("qscheme", "per_group")
    weight.only("scale_format")
    weight.only("ch_axis", -1, 1)
    weight.ignore("symmetric")  # files have zero points of symmetric codes, too
    is_signed = weight.raw("dtype") == "int4"
    group = group_size(weight, "group_size")
    layout = CodeLayout("quark-int4", 4, group, has_zeros=True, is_signed=is_signed)
    return layout if is_reordered else replace(layout, packing="quark-int4-order")


def _rows(rows: ConfigReader, dtype: str) -> RowScheme:
    """A scale of a whole batch becomes one for each row, where it is found while the model runs."""
    _check(rows, is_dynamic=None)
    rows.only("dtype", dtype)
    rows.only("symmetric", True)
    rows.only("scale_format")
    rows.only("ch_axis", 1, -1)
    rows.only("group_size")
    is_static = not rows.flag("is_dynamic", False)
    allowed = ("per_tensor",) if is_static else ("per_tensor", "per_channel", "per_token")
    if rows.raw("qscheme", "per_tensor") not in allowed:
        raise unsupported(rows.at("qscheme"), rows.raw("qscheme"), " or ".join(allowed))
    return RowScheme(is_static=is_static)
