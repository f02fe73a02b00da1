"""MLX: codes of two to eight bits in words along the inputs, with a scale and a bias for each group
of them, or floats of four or eight bits with a scale, as mlx-lm writes checkpoints. Embedding
tables and heads are quantised, too, and experts are stored as one module for each projection.
"""

from __future__ import annotations

import re
from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.keys import group_size
from quire.models.formats.storage import CodeLayout, Storage

_BITS = (2, 3, 4, 5, 6, 8)
_OF_ALL = ("quant_method", "group_size", "bits", "mode", "quantize_input")
"""Keys that are not the names of modules."""

_AFFINE = CodeLayout("mlx", 4, 64, has_zeros=False)
_MODES = {
    "affine": _AFFINE,
    "mxfp4": CodeLayout("mlx-mxfp4", 4, 32, has_zeros=False),
    "nvfp4": CodeLayout("mlx-nvfp4", 4, 16, has_zeros=False),
    "mxfp8": CodeLayout("mlx-mxfp8", 8, 32, has_zeros=False),
}
"""A mode's layout, with the numbers that it has by default."""


_ALL = re.compile(r"(.+)\.switch_mlp\.(gate|up|down)_proj\.(weight|scales|biases|bias)")
"""A tensor of all experts of a layer."""
_ONE = re.compile(r"(.+)\.experts\.\d+\.(\w+)")
"""A module of one expert in a Hugging Face checkpoint."""
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
"""Names of Mixtral's projections and of its kin, whose experts are in a `block_sparse_moe`."""


def expert_names(stored: str, count: int) -> list[str]:
    """The names that a tensor of `count` experts of mlx-lm has in a Hugging Face checkpoint, one
    for each expert; empty where it is not of experts.
    """
    found = _ALL.fullmatch(stored)
    if found is None:
        return []
    at, part, leaf = found.groups()
    name = _MIXTRAL[part] if at.endswith("block_sparse_moe") else f"{part}_proj"
    return [f"{at}.experts.{expert}.{name}.{leaf}" for expert in range(count)]


def _name_of_all(module: str) -> str:
    """The name that mlx-lm has for the module of all experts of which `module` is one."""
    found = _ONE.fullmatch(module)
    if found is None:
        return module
    at, name = found.groups()
    part = next((f"{ours}_proj" for ours, theirs in _MIXTRAL.items() if theirs == name), name)
    return f"{at}.switch_mlp.{part}"


def read_mlx(reader: ConfigReader) -> Storage:
    """A module may have an entry by its name: false where it is stored as it is, or its own numbers
    instead of those for all. Modules that the files store plainly need not be listed.
    """
    layout = _layout(reader)
    own: dict[str, CodeLayout | None] = {}
    for module in (key for key in reader.keys() if key not in _OF_ALL):  # noqa: SIM118
        value = reader.raw(module)
        if isinstance(value, bool):
            own[module] = layout if value else None
        elif isinstance(value, dict) and value:
            section = ConfigReader(value, f"{reader.at(module)}.", is_part=True)
            own[module] = _layout(section)
            section.finish()
        else:
            allowed = "true, false, or an object with group_size and bits"
            raise unsupported(reader.at(module), value, allowed)

    def layout_of(module: str) -> CodeLayout | None:
        return own.get(module, own.get(_name_of_all(module), layout))

    return Storage(
        "mlx",
        layout_of,
        is_decided_by_files=True,
        group=0,
        widened_because="products take codes of MLX neither with biases nor in words",
    )


def _layout(reader: ConfigReader) -> CodeLayout:
    """Layout of codes. Absent keys have the default of the mode, in an entry for a module, too."""
    reader.only("quantize_input", False)
    mode: CodeLayout = reader.choice("mode", _MODES, "affine")
    if mode.packing != _AFFINE.packing:
        reader.only("bits", mode.bits)
        reader.only("group_size", mode.group)
        return mode
    group = group_size(reader, "group_size", mode.group or -1)
    if group is None:
        raise unsupported(reader.at("group_size"), -1, "a multiple of 8")
    return replace(mode, bits=reader.choice_of("bits", *_BITS, absent=mode.bits), group=group)
