"""torchao: weights that are tensor subclasses, as transformers writes their parts to safetensors:
whole numbers of one to eight bits, each in a byte, e4m3, and numbers of four bits in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.expressions import Expressions
from quire.models.formats.keys import group_size, has_segment, names
from quire.models.formats.storage import CodeLayout, RowScheme, Storage

_DEFAULT = "_default"
_WIDENED = "products take whole numbers as zero points, and groups of torchao's int4 have others"
_ROUNDING = "to 8 bits with zero points"
_OF_KERNELS = ("set_inductor_config", "kernel_preference", "mm_config", "alg_id")
"""Keys about how torchao's own products run."""


def read_torchao(reader: ConfigReader) -> Storage:
    """A config for all linear modules, or by name or expression; plain ones need no entry."""
    reader.ignore("quant_type_kwargs", "untie_embedding_weights")
    reader.only("include_input_output_embeddings", False)
    kept = names(reader, "modules_to_not_convert")
    outer = reader.section("quant_type")
    inner = None if outer is None else outer.section("default")
    if inner is None:
        allowed = "an object with the config of all modules as `default`"
        raise unsupported(reader.at("quant_type"), reader.raw("quant_type", None), allowed)
    layout_of, schemes = _modules(inner)

    def layout(module: str) -> CodeLayout | None:
        return None if has_segment(module, kept) else layout_of(module)

    return Storage(
        "torchao",
        layout,
        is_decided_by_files=True,
        group=max(scheme.group or 0 for scheme in schemes),
        skipped_rounding=_ROUNDING if any(scheme.skips_rows for scheme in schemes) else None,
        widened_because=_WIDENED if any(scheme.is_widened for scheme in schemes) else None,
    )


def _modules(
    reader: ConfigReader,
) -> tuple[Callable[[str], CodeLayout | None], list[CodeLayout]]:
    """The layout of a module by its name, and all layouts."""
    if reader.raw("_type", None) not in ("FqnToConfig", "ModuleFqnToConfig"):
        layout = _scheme(reader)
        return lambda module: layout, [layout]
    reader.ignore("_type", "_version")
    data = reader.section("_data")
    key = "fqn_to_config"
    table = None if data is None else data.raw(key, None) or data.raw("module_fqn_to_config", None)
    if data is None or not isinstance(table, dict):
        raise unsupported(reader.at(f"_data.{key}"), table, "an object of configs by module")
    data.ignore("module_fqn_to_config", "version")
    own: dict[str, CodeLayout | None] = {}
    for name, value in table.items():
        own[name] = None
        if value is not None:
            if not isinstance(value, dict):
                raise unsupported(data.at(f"{key}.{name}"), value, "an object, or null")
            inner = ConfigReader(value, f"{data.at(key)}.{name}.", is_part=True)
            own[name] = _scheme(inner)
            inner.finish()
    texts = [name for name in own if name.startswith("re:")]
    patterns = Expressions().compile([text.removeprefix("re:") for text in texts], data.at(key))
    others = list(zip(patterns, (own[text] for text in texts), strict=True))

    def layout_of(module: str) -> CodeLayout | None:
        for name in (f"{module}.weight", module):
            if name in own:
                return own[name]
        for pattern, layout in others:
            if pattern.fullmatch(f"{module}.weight") or pattern.fullmatch(module):
                return layout
        return own.get(_DEFAULT)

    layouts = [layout for layout in own.values() if layout is not None]
    if not layouts:
        raise unsupported(data.at(key), table, "at least one config")
    return layout_of, layouts


def _scheme(reader: ConfigReader) -> CodeLayout:
    """The layout of a config's weights."""
    reader.ignore("_version")
    read = reader.choice("_type", _SCHEMES)
    data = reader.section("_data") or ConfigReader({}, f"{reader.at('_data')}.", is_part=True)
    data.ignore(*_OF_KERNELS)
    layout: CodeLayout = read(data)
    return layout


def _whole_numbers(data: ConfigReader) -> CodeLayout:
    data.only("group_size")
    group, outputs = _granularity(data, "granularity", data.raw("granularity", None))
    return CodeLayout("torchao", 8, group, has_zeros=True, outputs=outputs)


def _whole_numbers_and_rows(data: ConfigReader) -> CodeLayout:
    data.only("weight_only_decode", False)
    data.only("reduce_range", False)
    group, outputs = _granularity(data, "granularity", _of_weights(data))
    is_symmetric = _enum(data, "act_mapping_type", "SYMMETRIC") == "SYMMETRIC"
    return CodeLayout(
        "torchao",
        8,
        group,
        # activations with zero points would need them in products, which have none for rows
        has_zeros=is_symmetric is False,
        outputs=outputs,
        rows=RowScheme() if is_symmetric else None,
        skips_rows=not is_symmetric,
    )


def _bits(data: ConfigReader, granularity: str, mapping: str) -> CodeLayout:
    bits = _dtype(data, "weight_dtype", "int8").removeprefix("int")
    if bits not in map(str, range(1, 9)):
        raise unsupported(data.at("weight_dtype"), bits, "torch.int1 to torch.int8")
    _enum(data, mapping, "SYMMETRIC")
    packing = data.raw("intx_packing_format", None)
    if _value(packing, "UNPACKED_TO_INT8").upper() != "UNPACKED_TO_INT8":
        raise unsupported(data.at("intx_packing_format"), packing, "'unpacked_to_int8'")
    data.ignore("scale_dtype", "weight_scale_dtype", "intx_choose_qparams_algorithm", "layout")
    group, _ = _granularity(data, granularity, data.raw(granularity, None))
    # numbers of fewer bits are numbers of 4 or 8 bits as well, which products take
    return CodeLayout("torchao", 4 if int(bits) <= 4 else 8, group, has_zeros=True)


def _whole_bits(data: ConfigReader) -> CodeLayout:
    return _bits(data, "granularity", "mapping_type")


def _whole_bits_and_rows(data: ConfigReader) -> CodeLayout:
    layout = _bits(data, "weight_granularity", "weight_mapping_type")
    if _enum(data, "act_mapping_type", "ASYMMETRIC") == "SYMMETRIC":
        return replace(layout, rows=RowScheme())
    return replace(layout, skips_rows=True)


def _floats(data: ConfigReader) -> CodeLayout:
    _check_e4m3(data, "weight_dtype")
    group, outputs = _granularity(data, "granularity", data.raw("granularity", None))
    return CodeLayout("torchao-fp8", 8, group, has_zeros=False, outputs=outputs)


def _floats_and_rows(data: ConfigReader) -> CodeLayout:
    _check_e4m3(data, "weight_dtype")
    _check_e4m3(data, "activation_dtype")
    for key in ("activation_value_lb", "activation_value_ub"):
        data.only(key)
    packing = data.raw("packing_format", None)
    if _value(packing, "PLAIN").upper() != "PLAIN":
        raise unsupported(data.at("packing_format"), packing, "'plain'")
    group, outputs = _granularity(data, "granularity", _of_weights(data))
    return CodeLayout(
        "torchao-fp8", 8, group, has_zeros=False, outputs=outputs, rows=RowScheme(group or 0)
    )


def _four_bits(data: ConfigReader) -> CodeLayout:
    packing = data.raw("int4_packing_format", None)
    if _value(packing, "PLAIN").upper() != "PLAIN":
        allowed = "'plain'; the others are orders of one device's kernels"
        raise unsupported(data.at("int4_packing_format"), packing, allowed)
    data.ignore("int4_choose_qparams_algorithm", "int4_tile_packed_ntile")
    group = group_size(data, "group_size", 128)
    if group is None:
        raise unsupported(data.at("group_size"), -1, "a multiple of 8")
    return CodeLayout("torchao-int4", 4, group, has_zeros=True)


_SCHEMES: Mapping[str, Callable[[ConfigReader], CodeLayout]] = MappingProxyType(
    {
        "Float8DynamicActivationFloat8WeightConfig": _floats_and_rows,
        "Float8WeightOnlyConfig": _floats,
        "Int4WeightOnlyConfig": _four_bits,
        "Int8DynamicActivationInt8WeightConfig": _whole_numbers_and_rows,
        "Int8DynamicActivationIntxWeightConfig": _whole_bits_and_rows,
        "Int8WeightOnlyConfig": _whole_numbers,
        "IntxWeightOnlyConfig": _whole_bits,
    }
)


def _of_weights(data: ConfigReader) -> Any:
    """The granularity of weights, the second where activations have one of their own."""
    value = data.raw("granularity", None)
    return value[1] if isinstance(value, list) and len(value) == 2 else value


def _granularity(data: ConfigReader, key: str, value: Any) -> tuple[int | None, int | None]:
    """Inputs with one scale (None: all of them), and outputs (None: all of them)."""
    allowed = "PerRow, PerTensor, PerAxis(0) or PerGroup"
    if value is None:
        return None, 1
    if not isinstance(value, dict):
        raise unsupported(data.at(key), value, allowed)
    kind, about = value.get("_type"), value.get("_data") or {}
    if kind == "PerTensor":
        return None, None
    if kind == "PerRow" and about.get("dim", -1) == -1:
        return None, 1
    if kind == "PerAxis" and about.get("axis") == 0:
        return None, 1
    if kind == "PerGroup":
        inner = ConfigReader(about, f"{data.at(key)}.", is_part=True)
        return group_size(inner, "group_size"), 1
    raise unsupported(data.at(key), value, allowed)


def _enum(data: ConfigReader, key: str, absent: str) -> str:
    """The name of a mapping of numbers to codes."""
    value = data.raw(key, None)
    found = _value(value, absent)
    if found not in ("SYMMETRIC", "ASYMMETRIC"):
        raise unsupported(data.at(key), value, "SYMMETRIC or ASYMMETRIC")
    return found


def _dtype(data: ConfigReader, key: str, absent: str) -> str:
    return _value(data.raw(key, None), absent).removeprefix("torch.")


def _check_e4m3(data: ConfigReader, key: str) -> None:
    if _dtype(data, key, "float8_e4m3fn") != "float8_e4m3fn":
        raise unsupported(data.at(key), data.raw(key), "torch.float8_e4m3fn")


def _value(stored: Any, absent: str) -> str:
    """A value that torchao's configs have as an object with its type, or bare."""
    found = stored.get("_data") if isinstance(stored, dict) else stored
    return absent if found is None else str(found)
