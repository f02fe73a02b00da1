"""compressed-tensors: groups of modules, each with a scheme of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.expressions import Expressions
from quire.models.formats.fp8 import floats, read_block
from quire.models.formats.keys import (
    OF_CALIBRATION,
    ModuleNames,
    cache_type,
    check_types,
    group_size,
    module_names,
    names,
)
from quire.models.formats.storage import CodeLayout, Packing, RowScheme, Storage, skipped_rounding

_KINDS = {
    "pack-quantized": "packed",
    "int-quantized": "bytes",
    "float-quantized": "floats",
    "naive-quantized": "any",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp8-quantized": "mxfp8",
}
"""Format of a group -> how its weights are stored; any: unpacked, of the type that they have."""
_FOUR_BIT_FLOATS: Mapping[str, tuple[str, int, str]] = MappingProxyType(
    {
        "mxfp4": ("group", 32, "torch.uint8"),
        "nvfp4": ("tensor_group", 16, "torch.float8_e4m3fn"),
    }
)
"""Format of four-bit floats -> its strategy, inputs with one scale, and the scale's type."""
_PACKINGS: dict[str, Packing] = {"int": "bytes", "float": "floats"}
_WITHIN = ".linear"
"""Ends of names of linear modules within ones that wrap them; the text's have the wrapper's."""
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class _Group:
    """A layout, and which modules have it by name; `is_for_all`: every linear module."""

    layout: CodeLayout
    targets: ModuleNames
    is_for_all: bool


def read_compressed_tensors(reader: ConfigReader) -> Storage:
    """A module has the scheme of the first group that names it, else of the first for all linear
    modules; those on the list `ignore` are stored as they are.
    """
    reader.ignore("version", "global_compression_ratio", "quantization_status")
    reader.only("format", *_KINDS, "mixed-precision")
    overall = reader.raw("format", None)
    cache = cache_type(reader)
    reader.only("sparsity_config", {}, {"format": "dense"})
    reader.only("transform_config", {})
    reader.only("moe_sparsity_config", {})
    expressions = Expressions()
    listed = names(reader, "ignore")
    inner = (name.removesuffix(_WITHIN) for name in listed if not name.startswith("re:"))
    ignored = module_names((*listed, *inner), reader.at("ignore"), expressions)
    section = reader.section("config_groups")
    if section is None:
        raise unsupported(reader.at("config_groups"), {}, "at least one group of modules")
    groups = [_group(section, name, overall, expressions) for name in section.keys()]  # noqa: SIM118

    def layout_of(module: str) -> CodeLayout | None:
        if ignored.have(module):
            return None
        named = (g for g in groups if g.targets.have(module))
        found = next(named, None) or next((g for g in groups if g.is_for_all), None)
        return None if found is None else found.layout

    group = max(g.layout.group or 0 for g in groups)
    return Storage(
        "compressed-tensors",
        layout_of,
        is_decided_by_files=False,
        group=group,
        skipped_rounding=skipped_rounding(g.layout for g in groups),
        cache=cache,
    )


def _group(
    section: ConfigReader, name: str, overall: str | None, expressions: Expressions
) -> _Group:
    group = section.section(name)
    if group is None:
        raise unsupported(section.at(name), {}, "a scheme with targets and weights")
    kind = group.choice("format", _KINDS, overall)
    group.only("output_activations", None)
    weights, rows = group.section("weights"), group.section("input_activations")
    if weights is None:
        raise unsupported(group.at("weights"), None, "how weights are quantised")
    if kind == "packed" and rows is not None:
        allowed = "null for weights that are packed: activations keep their values"
        raise unsupported(group.at("input_activations"), group.raw("input_activations"), allowed)
    if kind in _FOUR_BIT_FLOATS:
        layout = _four_bit_floats(weights, rows, kind)
    elif kind == "mxfp8":
        layout = _microscaled(weights, rows)
    else:
        layout = _packed(weights) if kind == "packed" else _unpacked(weights, rows, kind)
    targets = names(group, "targets")
    others = (target for target in targets if target != "Linear")
    meant = module_names(others, group.at("targets"), expressions)
    return _Group(layout, meant, "Linear" in targets)


def _packed(weights: ConfigReader) -> CodeLayout:
    weights.ignore(*OF_CALIBRATION)
    weights.only("type", "int")
    weights.only("dynamic", False)
    weights.only("block_structure")
    check_types(weights)
    has_groups = weights.choice(
        "strategy", {"group": True, "channel": False}, "group_size" in weights
    )
    group = group_size(weights, "group_size")
    return CodeLayout(
        "compressed-tensors",
        weights.choice_of("num_bits", 4, 8),
        group if has_groups else None,
        has_zeros=not weights.flag("symmetric", True),
        is_reordered=weights.choice("actorder", _ORDERS, "weight"),
    )


def _unpacked(weights: ConfigReader, rows: ConfigReader | None, kind: str) -> CodeLayout:
    """Weights in bytes: whole numbers, or e4m3."""
    weights.ignore(*OF_CALIBRATION)
    weights.only("dynamic", False)
    weights.only("actorder", "weight", "static")
    weights.only("symmetric", True)
    check_types(weights)
    packing = weights.choice("type", _PACKINGS, "int")
    if kind not in ("any", packing):
        raise unsupported(weights.at("type"), weights.raw("type", "int"), "that of the format")
    bits = weights.choice_of("num_bits", *((8,) if packing == "floats" else (4, 8)))
    strategy = weights.choice("strategy", {name: name for name in _STRATEGIES}, "tensor")
    block = read_block(weights, "block_structure") if strategy == "block" else None
    group = group_size(weights, "group_size")
    if strategy == "block":
        if block is None:
            raise unsupported(weights.at("block_structure"), None, "[outputs, inputs]")
        group = block[1]
    else:
        weights.only("block_structure")
    outputs = {"tensor": None, "block": None if block is None else block[0]}.get(strategy, 1)
    return CodeLayout(
        packing,
        bits,
        group if strategy in ("group", "block") else None,
        has_zeros=False,
        outputs=outputs,
        rows=None if rows is None else _rows(rows, weights.raw("type", "int")),
    )


def _four_bit_floats(weights: ConfigReader, rows: ConfigReader | None, kind: str) -> CodeLayout:
    """Weights in e2m1; what is said of activations in the same type is read past."""
    strategy, group, scale = _FOUR_BIT_FLOATS[kind]
    weights.ignore(*OF_CALIBRATION)
    weights.only("dynamic", False)
    weights.only("actorder", "weight", "static")
    weights.only("block_structure")
    weights.only("symmetric", True)
    weights.only("type", "float")
    weights.only("scale_dtype", scale)
    weights.only("zp_dtype", "torch.int8", scale)
    weights.choice_of("num_bits", 4)
    weights.choice_of("strategy", strategy)
    weights.choice_of("group_size", group)
    if rows is not None:
        rows.ignore(*rows.keys())
        rows.choice_of("num_bits", 4)
        rows.choice_of("type", "float")
    packing: Packing = "mxfp4" if kind == "mxfp4" else "nvfp4"
    return CodeLayout(packing, 4, group, has_zeros=False, skips_rows=rows is not None)


def _microscaled(weights: ConfigReader, rows: ConfigReader | None) -> CodeLayout:
    """Weights in e4m3 whose scales are powers of two; the same type of activations is read past."""
    weights.ignore(*OF_CALIBRATION)
    weights.only("dynamic", False)
    weights.only("actorder", "weight", "static")
    weights.only("block_structure")
    weights.only("symmetric", True)
    weights.only("scale_dtype", "torch.uint8")
    weights.only("zp_dtype", "torch.int8", "torch.uint8")
    weights.choice_of("num_bits", 8)
    weights.choice_of("type", "float")
    weights.choice_of("strategy", "group")
    weights.choice_of("group_size", 32)
    if rows is not None:
        rows.ignore(*rows.keys())
        rows.choice_of("num_bits", 8)
        rows.choice_of("type", "float")
    return replace(floats(32, 1, None), skips_rows=rows is not None)


def _rows(rows: ConfigReader, of_weights: str) -> RowScheme:
    """A scale of a whole batch would make a row's result depend on the others, so that each row has
    its own where the scheme finds scales while the model runs.
    """
    rows.ignore(*OF_CALIBRATION)
    rows.only("actorder", "weight", "static")
    rows.only("block_structure")
    rows.only("type", of_weights)
    rows.choice_of("num_bits", 8)
    rows.only("symmetric", True)
    check_types(rows)
    is_static = not rows.flag("dynamic", False)
    allowed = ("tensor",) if is_static else ("token", "tensor", "group")
    strategy = rows.choice("strategy", {name: name for name in allowed}, "tensor")
    group = group_size(rows, "group_size")
    return RowScheme((group or 0) if strategy == "group" else 0, is_static)


_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
"""Order in which inputs were quantised -> whether their groups are stored for each."""
