"""What a checkpoint's quantisation is to the loader: the layout of each module's codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from quire.models.config_reader import ConfigReader, unsupported

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
]
"""How codes, scales and zero points are packed into tensors; bytes and 8-bit floats are not. The
last four are of 4-bit floats.
"""

SMALLEST_GROUP = 8
"""Inputs with one scale: what products read at once."""

FLOATS = ("BF16", "F16", "F32", "F64")
"""Types of numbers that a weight may be stored in as it is."""
_SCALES = FLOATS[:3]
_MOST_PATTERN = 400
"""Characters of a regular expression in a config."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors in which a module's weight is stored: its shape, and the types that it may
    have. An optional one may be missing; a loose one may have other axes of one at its end.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False
    is_loose: bool = False

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether it may be stored with this one."""
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

CACHE_SCALES = re.compile(r".*\.([kqv]|kv)_scale|.*\.[kqv]_proj\.output_scale")
"""Names of the scales of a K/V cache in 8 bits that a checkpoint may bring. They are not read: each
key and value has its own here.
"""

FOUR_BIT_FLOATS: Mapping[Packing, FourBitFloats] = MappingProxyType(
    {
        "mxfp4": FourBitFloats("weight_packed", "weight_scale", _EXPONENTS),
        "nvfp4": FourBitFloats(
            "weight_packed", "weight_scale", ("F8_E4M3",), "weight_global_scale", divides=True
        ),
        "modelopt-nvfp4": FourBitFloats("weight", "weight_scale", ("F8_E4M3",), "weight_scale_2"),
        "gpt-oss": FourBitFloats("blocks", "scales", _EXPONENTS),
    }
)


@dataclass(frozen=True, slots=True)
class RowScheme:
    """How activations are rounded, to the type of the weight's codes: with a scale for every
    `group` inputs (0: the row) that is found while the model runs, or with a stored one.
    """

    group: int = 0
    is_static: bool = False


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """How the weight of a module is stored as codes of `bits` bits.

    group: inputs with one scale; None: all of them. has_zeros: with a zero point each, else it is
    the middle of the codes. is_reordered: each input has the group that g_idx names.
    is_one_less: zero points are stored as one less than they are. outputs: with one scale; None:
    all of them. scale_name: of the tensor of scales that are not packed. rows: how activations are
    rounded; None: they keep their values.
    """

    packing: Packing
    bits: Literal[4, 8]
    group: int | None
    has_zeros: bool
    is_reordered: bool = False
    is_one_less: bool = False
    outputs: int | None = 1
    scale_name: str = "weight_scale"
    rows: RowScheme | None = None

    def parts(self, *shape: int) -> dict[str, StoredPart]:
        """The tensors of a weight [outputs, inputs], or of one of each expert [experts, outputs,
        inputs], by what follows the module's name.
        """
        if self.packing in FOUR_BIT_FLOATS:
            return _four_bit_floats(self, *shape)
        return _PARTS[self.packing](self, *shape)

    @property
    def marker(self) -> str:
        """The tensor that every module with this layout has, and no other."""
        if self.packing in ("bytes", "floats"):
            return self.scale_name
        if self.packing in FOUR_BIT_FLOATS:
            return FOUR_BIT_FLOATS[self.packing].scales
        return "weight_packed" if self.packing == "compressed-tensors" else "qweight"

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Of the weight, with scales of 16 bits, or of 32 next to codes that are not packed and
        where they have a factor.
        """
        groups = self.groups(inputs)
        if self.packing in ("bytes", "floats"):
            return outputs * (inputs + 4 * groups)
        if self.packing in FOUR_BIT_FLOATS:
            has_factor = FOUR_BIT_FLOATS[self.packing].factor is not None
            return outputs * (-(-inputs // 2) + (4 if has_factor else 2) * groups)
        return outputs * (_words(inputs, self.bits) * 4 + groups * (2 + self.has_zeros))

    def groups(self, inputs: int) -> int:
        """How many scales an output has."""
        return 1 if self.group is None else -(-inputs // self.group)


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
    parts = {
        "weight": StoredPart((outputs, inputs), (dtype,)),
        layout.scale_name: StoredPart(scales, _SCALES, is_loose=True),
    }
    if layout.rows is not None and layout.rows.is_static:
        parts["input_scale"] = StoredPart((), _SCALES, is_loose=True)
    return parts


def _four_bit_floats(layout: CodeLayout, *shape: int) -> dict[str, StoredPart]:
    """Those of experts have their codes by groups."""
    where = FOUR_BIT_FLOATS[layout.packing]
    rows, groups = shape[:-1], layout.groups(shape[-1])
    codes = (groups, (layout.group or 0) // 2) if len(rows) > 1 else (-(-shape[-1] // 2),)
    parts = {
        where.codes: StoredPart((*rows, *codes), ("U8",)),
        where.scales: StoredPart((*rows, groups), where.types),
    }
    if where.factor is None:
        return parts
    scalar = StoredPart((), _SCALES, is_optional=True, is_loose=True)
    parts[where.factor] = StoredPart((), _SCALES, is_loose=True)
    # of activations, which keep their values
    return parts | dict.fromkeys(("input_global_scale", "input_scale"), scalar)


_PARTS: dict[Packing, Callable[[CodeLayout, int, int], dict[str, StoredPart]]] = {
    "awq": _packed_along_outputs,
    "gptq": _packed_along_inputs,
    "compressed-tensors": _compressed,
    "bytes": _unpacked,
    "floats": _unpacked,
}


@dataclass(frozen=True, slots=True)
class Storage:
    """A checkpoint's quantisation.

    method: its name. layout_of: the layout of a module's weight by its name in the checkpoint, or
    None for one that is stored as it is. is_decided_by_files: modules that have no codes in the
    files are stored as they are, too; the config does not list them. group: the largest number of
    inputs with one scale, 0 where all of them have one. experts: the layout of tensors that hold
    all experts of a layer. keeps_rows: the format rounds activations in a way that is not done
    here; they keep their values.
    """

    method: str
    layout_of: Callable[[str], CodeLayout | None]
    is_decided_by_files: bool
    group: int
    experts: CodeLayout | None = None
    keeps_rows: bool = False


def group_size(reader: ConfigReader, key: str, absent: int = -1) -> int | None:
    """A number of inputs with one scale; None for -1, all of them."""
    value = reader.integer(key, absent, minimum=-1)
    if value == -1:
        return None
    if value < 1 or value % SMALLEST_GROUP:
        raise unsupported(reader.at(key), value, f"-1 or a multiple of {SMALLEST_GROUP}")
    return int(value)


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
