"""A checkpoint's quantisation for the loader: the layout of each module's codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Packing = Literal[
    "awq",
    "gptq",
    "compressed-tensors",
    "bytes",
    "floats",
    "mxfp4",
    "nvfp4",
    "modelopt-nvfp4",
    "gpt-oss",
    "bitsandbytes-int8",
    "bitsandbytes-nf4",
    "bitsandbytes-fp4",
    "mlx",
    "mlx-mxfp4",
    "mlx-nvfp4",
    "mlx-mxfp8",
    "torchao",
    "torchao-fp8",
    "torchao-int4",
    "hqq",
    "hqq-axis0",
    "quark-int4",
    "quark-int4-order",
    "quark-mxfp4",
    "deepseek-mxfp4",
]
"""Packing of codes, scales and zero points into tensors; bytes and 8-bit floats are not packed. The
four from mxfp4 on are of 4-bit floats.
"""

_BYTES: tuple[Packing, ...] = ("bytes", "floats", "bitsandbytes-int8", "torchao", "torchao-fp8")
FLATTENED: Mapping[Packing, str] = MappingProxyType(
    {"bitsandbytes-nf4": "nf4", "bitsandbytes-fp4": "fp4"}
)
"""Packings of codes of four bits and of blocks that run over the ends of rows, with a table of
numbers of their own -> their `quant_type`.
"""
_MLX: tuple[Packing, ...] = ("mlx", "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8")
WIDENED: tuple[Packing, ...] = (*_MLX, "torchao-int4", "hqq", "hqq-axis0")
"""Packings of weights that products cannot take as codes: plain numbers once loaded."""
_MARKERS: Mapping[Packing, str] = MappingProxyType(
    {
        "compressed-tensors": "weight_packed",
        "hqq": "W_q",
        "hqq-axis0": "W_q",
        **dict.fromkeys(_MLX, "scales"),
        "quark-int4": "weight_scale",
        "quark-int4-order": "weight_scale",
        "torchao": "_weight_qdata",
        "torchao-fp8": "_weight_qdata",
        "torchao-int4": "_weight_qdata",
    }
)
"""Packings -> the tensor that all modules with codes have, and no others."""
SCALES_WITH_ONE_SCALE = 256
"""Scales of blocks that share one scale, where they are rounded to bytes themselves."""

SMALLEST_GROUP = 8
"""Inputs with one scale: what products read at once."""

FLOATS = ("BF16", "F16", "F32", "F64")
"""Types of numbers that a weight may be stored in as it is."""
WHOLE_NUMBERS = ("I64", "I32")
"""Types of numbers that a table of whole numbers may be stored in."""
_SCALES = FLOATS[:3]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors in which a module's weight is stored: its shape, and the types that it may
    have. An optional one may be missing; a loose one may have other axes of one at its end.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False
    is_loose: bool = False
    is_text: bool = False

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether it may be stored with this one."""
        if self.is_text:
            return len(shape) == 1
        return shape == self.shape or (self.is_loose and _core(shape) == _core(self.shape))


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without axes of one at its end."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


@dataclass(frozen=True, slots=True)
class FourBitFloats:
    """The tensors of numbers in e2m1: of codes, two in a byte, of scales, and perhaps of a `factor`
    that all scales are multiplied with or, if it `divides` them, divided by. Scales of bytes are
    exponents of two.
    """

    codes: str
    scales: str
    types: tuple[str, ...]
    factor: str | None = None
    divides: bool = False


_EXPONENTS = ("U8", "F8_E8M0")

FOUR_BIT_FLOATS: Mapping[Packing, FourBitFloats] = MappingProxyType(
    {
        "mxfp4": FourBitFloats("weight_packed", "weight_scale", _EXPONENTS),
        "nvfp4": FourBitFloats(
            "weight_packed", "weight_scale", ("F8_E4M3",), "weight_global_scale", divides=True
        ),
        "modelopt-nvfp4": FourBitFloats("weight", "weight_scale", ("F8_E4M3",), "weight_scale_2"),
        "gpt-oss": FourBitFloats("blocks", "scales", _EXPONENTS),
        "quark-mxfp4": FourBitFloats("weight", "weight_scale", _EXPONENTS),
        "deepseek-mxfp4": FourBitFloats("weight", "scale", _EXPONENTS),
    }
)


@dataclass(frozen=True, slots=True)
class RowScheme:
    """Rounding of activations to the type of the weight's codes: with a scale for every
    `group` inputs (0: the row) that is found while the model runs, or with a stored one.
    """

    group: int = 0
    is_static: bool = False


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """Storage of a module's weight as codes of `bits` bits.

    group: inputs with one scale; None: all of them. has_zeros: with a zero point each, else it is
    the middle of the codes. is_reordered: each input has the group that g_idx names.
    is_one_less: zero points are stored as one less than they are. outputs: with one scale; None:
    all of them. scale_name: of the tensor of scales that are not packed. rows: how activations are
    rounded; None: they keep their values. is_nested: scales are rounded to bytes, and have scales.
    skips_rows: the format rounds activations in a way that is not done here. is_signed: codes and
    zero points are stored as whole numbers around 0.
    """

    packing: Packing
    bits: Literal[1, 2, 3, 4, 5, 6, 8]
    group: int | None
    has_zeros: bool
    is_reordered: bool = False
    is_one_less: bool = False
    outputs: int | None = 1
    scale_name: str = "weight_scale"
    rows: RowScheme | None = None
    is_nested: bool = False
    skips_rows: bool = False
    is_signed: bool = False

    def parts(self, *shape: int) -> dict[str, StoredPart]:
        """The tensors of a weight [outputs, inputs], or of one of each expert [experts, outputs,
        inputs], by what follows the module's name.
        """
        if self.packing in FOUR_BIT_FLOATS:
            return _four_bit_floats(self, *shape)
        return _PARTS[self.packing](self, *shape)

    @property
    def is_widened(self) -> bool:
        """Whether the weight becomes plain numbers while it is loaded."""
        return self.packing in WIDENED

    @property
    def has_tables(self) -> bool:
        """Whether embedding tables are stored so, as the weights of linear modules are."""
        return self.packing in _MLX

    @property
    def marker(self) -> str:
        """The tensor that every module with this layout has, and no other."""
        if self.packing in _MARKERS:
            return _MARKERS[self.packing]
        if self.packing in _BYTES:
            return self.scale_name
        if self.packing in FLATTENED:
            return "weight.absmax"
        if self.packing in FOUR_BIT_FLOATS:
            return FOUR_BIT_FLOATS[self.packing].scales
        return "qweight"

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """The bytes of the weight, with scales of 16 bits, or of 32 next to codes that are not
        packed, where they have a factor, and those of blocks over several rows.
        """
        groups = self.groups(inputs)
        if self.packing in _BYTES:
            return outputs * (inputs * self.bits // 8 + 4 * groups)
        if self.packing in FOUR_BIT_FLOATS:
            has_factor = FOUR_BIT_FLOATS[self.packing].factor is not None
            return outputs * (-(-inputs // 2) + (4 if has_factor else 2) * groups)
        if self.packing in FLATTENED:
            return outputs * (-(-inputs // 2) + 4 * groups)
        return outputs * (_words(inputs, self.bits) * 4 + groups * (2 + self.has_zeros))

    def group_in(self, inputs: int) -> int:
        """The inputs of an output that have one scale, where it has so many of them."""
        if self.packing in FLATTENED:
            # blocks run over the ends of rows: the largest run that never crosses one
            return math.gcd(inputs, self.group or 0)
        return min(self.group or inputs, inputs)

    def groups(self, inputs: int) -> int:
        """Number of scales of an output."""
        return 1 if self.group is None else -(-inputs // self.group_in(inputs))


def _words(count: int, bits: int) -> int:
    """Words of 32 bits that hold so many codes."""
    return -(-count * bits // 32)


def _packed_along_outputs(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    groups, words = layout.groups(inputs), _words(outputs, layout.bits)
    return {
        "qweight": StoredPart((inputs, words), ("I32",)),
        "qzeros": StoredPart((groups, words), ("I32",)),
        "scales": StoredPart((groups, outputs), _SCALES),
    }


def _packed_along_inputs(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    groups, words = layout.groups(inputs), _words(outputs, layout.bits)
    return {
        "qweight": StoredPart((_words(inputs, layout.bits), outputs), ("I32",)),
        "qzeros": StoredPart((groups, words), ("I32",)),
        "scales": StoredPart((groups, outputs), _SCALES),
        # without reordering it follows from the group, and some files leave it out
        "g_idx": StoredPart((inputs,), ("I32",), is_optional=not layout.is_reordered),
    }


def _compressed(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    groups = layout.groups(inputs)
    parts = {
        "weight_packed": StoredPart((outputs, _words(inputs, layout.bits)), ("I32",)),
        "weight_scale": StoredPart((outputs, groups), _SCALES),
        "weight_shape": StoredPart((2,), ("I64", "I32")),
    }
    if layout.has_zeros:
        packed = _words(outputs, layout.bits), groups
        parts["weight_zero_point"] = StoredPart(packed, ("I32",))
    if layout.is_reordered:
        parts["weight_g_idx"] = StoredPart((inputs,), ("I32",))
    return parts


def _unpacked(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    dtype = "F8_E4M3" if layout.packing == "floats" else "I8"
    scales: tuple[int, ...] = ()
    if layout.outputs is not None:
        scales = -(-outputs // layout.outputs), layout.groups(inputs)
    types = (*_SCALES, "F8_E8M0", "U8") if layout.packing == "floats" else _SCALES
    parts = {
        "weight": StoredPart((outputs, inputs), (dtype,)),
        layout.scale_name: StoredPart(scales, types, is_loose=True),
    }
    if layout.rows is not None and layout.rows.is_static:
        parts["input_scale"] = StoredPart((), _SCALES, is_loose=True)
    if layout.has_zeros:
        whole = "I8", "I32"
        parts["weight_zero_point"] = StoredPart(scales, whole, is_optional=True, is_loose=True)
        parts["input_zero_point"] = StoredPart((), whole, is_optional=True, is_loose=True)
    return parts


def _four_bit_floats(layout: CodeLayout, *shape: int) -> dict[str, StoredPart]:
    """The tensors of a weight in four-bit floats; experts have their codes by groups."""
    where = FOUR_BIT_FLOATS[layout.packing]
    rows, groups = shape[:-1], layout.groups(shape[-1])
    codes = (groups, (layout.group or 0) // 2) if len(rows) > 1 else (-(-shape[-1] // 2),)
    parts = {
        where.codes: StoredPart((*rows, *codes), ("U8", "I8")),
        where.scales: StoredPart((*rows, groups), where.types),
    }
    if where.factor is None:
        return parts
    scalar = StoredPart((), _SCALES, is_optional=True, is_loose=True)
    parts[where.factor] = StoredPart((), _SCALES, is_loose=True)
    # of activations, which keep their values
    return parts | dict.fromkeys(("input_global_scale", "input_scale"), scalar)


def _bytes_with_peaks(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    return {
        "weight": StoredPart((outputs, inputs), ("I8",)),
        layout.scale_name: StoredPart((outputs,), _SCALES, is_loose=True),
        "weight_format": StoredPart((), ("U8",), is_optional=True, is_loose=True),
    }


def _flattened(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    """Blocks are counted over the whole weight, row after row."""
    count = outputs * inputs
    blocks = -(-count // (layout.group or count))
    parts = {
        "weight": StoredPart((-(-count // 2),), ("U8",), is_loose=True),
        "weight.absmax": StoredPart((blocks,), ("U8",) if layout.is_nested else _SCALES),
        "weight.quant_map": StoredPart((16,), _SCALES),
        quant_state(layout): StoredPart((-1,), ("U8",), is_text=True),
    }
    if layout.is_nested:
        scales = -(-blocks // SCALES_WITH_ONE_SCALE)
        parts["weight.nested_absmax"] = StoredPart((scales,), _SCALES)
        parts["weight.nested_quant_map"] = StoredPart((256,), _SCALES)
    return parts


def _mlx(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    of_groups = StoredPart((outputs, layout.groups(inputs)), _SCALES)
    words = StoredPart((outputs, _words(inputs, layout.bits)), ("U32",))
    return {"weight": words, "scales": of_groups, "biases": of_groups}


def _mlx_floats(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    words = StoredPart((outputs, _words(inputs, layout.bits)), ("U32",))
    return {"weight": words, "scales": StoredPart((outputs, layout.groups(inputs)), ("U8",))}


def _torchao(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    dtype = "F8_E4M3" if layout.packing == "torchao-fp8" else "I8"
    scales = 1 if layout.outputs is None else outputs, layout.groups(inputs)
    zeros = StoredPart(scales, ("I8",), is_optional=True)
    parts = {
        "_weight_qdata": StoredPart((outputs, inputs), (dtype,)),
        "_weight_scale": StoredPart(scales, _SCALES),
    }
    return parts if dtype == "F8_E4M3" else parts | {"_weight_zero_point": zeros}


def _torchao_int4(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    of_groups = StoredPart((layout.groups(inputs), outputs), _SCALES)
    return {
        "_weight_qdata": StoredPart((outputs, inputs // 2), ("I8", "U8")),
        "_weight_scale": of_groups,
        "_weight_zero_point": of_groups,
    }


def _hqq(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    """Groups are rows of the flattened weight, or with axis 0 columns; rows are packed."""
    group = layout.group or inputs
    groups = outputs * inputs // group
    rows, columns = (groups, group) if layout.packing == "hqq" else (group, groups)
    # codes of three bits lie ten in a word of 32, others in bytes
    in_one = 10 if layout.bits == 3 else 8 // layout.bits
    of_groups = StoredPart((groups, 1) if layout.packing == "hqq" else (1, groups), _SCALES)
    flag = StoredPart((), ("U8", "I32", "I64"), is_optional=True, is_loose=True)
    text = StoredPart((-1,), ("U8",), is_optional=True, is_text=True)
    return {
        "W_q": StoredPart((-(-rows // in_one), columns), ("I32",) if in_one == 10 else ("U8",)),
        "scale": of_groups,
        "zero": of_groups,
        "shape": StoredPart((2,), ("I64", "I32"), is_optional=True),
        **dict.fromkeys(_HQQ_FLAGS, flag),
        **dict.fromkeys(("compute_dtype", "packing", "unpack_view_dtype"), text),
    }


_HQQ_FLAGS = (
    *("nbits", "group_size", "axis", "channel_wise", "encoded_state_dict", "offload_meta"),
    *("optimize", "quant_scale", "quant_zero", "round_zero", "stores_quant_config"),
    "view_as_float",
)
"""The state of a module of HQQ, which the config says too."""


def _quark_int4(layout: CodeLayout, outputs: int, inputs: int) -> dict[str, StoredPart]:
    groups, words = layout.groups(inputs), _words(outputs, 4)
    zeros = StoredPart((groups, words), ("I32",), is_optional=layout.is_signed)
    return {
        "weight": StoredPart((inputs, words), ("I32",)),
        "weight_scale": StoredPart((groups, outputs), _SCALES),
        "weight_zero_point": zeros,
    }


def quant_state(layout: CodeLayout) -> str:
    """The tensor whose bytes are a JSON object that describes a weight's blocks."""
    return f"weight.quant_state.bitsandbytes__{FLATTENED[layout.packing]}"


_PARTS: dict[Packing, Callable[[CodeLayout, int, int], dict[str, StoredPart]]] = {
    "awq": _packed_along_outputs,
    "gptq": _packed_along_inputs,
    "compressed-tensors": _compressed,
    "bytes": _unpacked,
    "floats": _unpacked,
    "bitsandbytes-int8": _bytes_with_peaks,
    "mlx": _mlx,
    **dict.fromkeys(_MLX[1:], _mlx_floats),
    "torchao": _torchao,
    "torchao-fp8": _torchao,
    "torchao-int4": _torchao_int4,
    "hqq": _hqq,
    "hqq-axis0": _hqq,
    "quark-int4": _quark_int4,
    "quark-int4-order": _quark_int4,
    **dict.fromkeys(FLATTENED, _flattened),
}


_SKIPPED = {4: "to 4 bits", 8: "to 8 bits with powers of two as scales"}


def skipped_rounding(layouts: Iterable[CodeLayout]) -> str | None:
    """The rounding of activations by formats of floats that is not done here; None: all is done."""
    bits = sorted({layout.bits for layout in layouts if layout.skips_rows})
    return " and ".join(_SKIPPED[each] for each in bits) or None


@dataclass(frozen=True, slots=True)
class Storage:
    """A checkpoint's quantisation.

    method: its name. layout_of: the layout of a module's weight by its name in the checkpoint, or
    None for one that is stored as it is. is_decided_by_files: modules that have no codes in the
    files are stored as they are, too; the config does not list them. group: the largest number of
    inputs with one scale, 0 where all of them have one. experts: the layout of tensors that hold
    all experts of a layer. skipped_rounding: how the format rounds activations where that
    is not done here; they keep their values. cache: of which type keys and values are to be, in 8
    bits; None: the config does not say. widened_because: why weights become plain numbers while
    they are loaded; None: they stay codes. lists_codes: the config names the modules that have
    codes, and not those that are stored as they are.
    """

    method: str
    layout_of: Callable[[str], CodeLayout | None]
    is_decided_by_files: bool
    group: int
    experts: CodeLayout | None = None
    skipped_rounding: str | None = None
    cache: Literal["float", "int"] | None = None
    widened_because: str | None = None
    lists_codes: bool = False
