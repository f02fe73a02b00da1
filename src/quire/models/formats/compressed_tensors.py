"""compressed-tensors: groups of modules, each with a scheme of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.formats.storage import CodeLayout, Storage, group_size, names, pattern

_FORMATS = ("pack-quantized", "mixed-precision")
_CALIBRATION = ("observer", "observer_kwargs")


@dataclass(frozen=True, slots=True)
class _Group:
    """A layout, and which modules have it by name; `is_for_all`: every linear module."""

    layout: CodeLayout
    targets: tuple[Callable[[str], bool], ...]
    is_for_all: bool


def read_compressed_tensors(reader: ConfigReader) -> Storage:
    """A module has the scheme of the first group that names it, else of the first for all linear
    modules; those on the list `ignore` are stored as they are.
    """
    reader.ignore("version", "global_compression_ratio", "quantization_status")
    reader.only("format", *_FORMATS)
    reader.only("kv_cache_scheme", None)
    reader.only("sparsity_config", {}, {"format": "dense"})
    reader.only("transform_config", {})
    reader.only("moe_sparsity_config", {})
    ignored = [_target(reader, "ignore", name) for name in names(reader, "ignore")]
    section = reader.section("config_groups")
    if section is None:
        raise unsupported(reader.at("config_groups"), {}, "at least one group of modules")
    groups = [_group(section, name) for name in section.keys()]  # noqa: SIM118 (no mapping)
    section.finish()

    def layout_of(module: str) -> CodeLayout | None:
        if any(is_meant(module) for is_meant in ignored):
            return None
        named = (g for g in groups if any(is_meant(module) for is_meant in g.targets))
        found = next(named, None) or next((g for g in groups if g.is_for_all), None)
        return None if found is None else found.layout

    group = max(g.layout.group or 0 for g in groups)
    return Storage("compressed-tensors", layout_of, is_decided_by_files=False, group=group)


def _group(section: ConfigReader, name: str) -> _Group:
    group = section.section(name)
    if group is None:
        raise unsupported(section.at(name), {}, "a scheme with targets and weights")
    group.only("format", "pack-quantized")
    for activations in ("input_activations", "output_activations"):
        group.only(activations, None)
    weights = group.section("weights")
    if weights is None:
        raise unsupported(group.at("weights"), None, "how weights are quantised")
    layout = _layout(weights)
    weights.finish()
    targets = names(group, "targets")
    group.finish()
    meant = tuple(_target(group, "targets", t) for t in targets if t != "Linear")
    return _Group(layout, meant, "Linear" in targets)


def _target(reader: ConfigReader, key: str, name: str) -> Callable[[str], bool]:
    if not name.startswith("re:"):
        return lambda module: module == name
    expression = pattern(name.removeprefix("re:"), reader.at(key))
    return lambda module: expression.match(module) is not None


def _layout(weights: ConfigReader) -> CodeLayout:
    weights.ignore(*_CALIBRATION)
    weights.only("type", "int")
    weights.only("dynamic", False)
    weights.only("block_structure")
    weights.only("scale_dtype", "torch.float16", "torch.bfloat16", "torch.float32")
    weights.only("zp_dtype", "torch.int8")
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


_ORDERS = {"group": True, "weight": False, "static": False}
"""In which order inputs were quantised -> whether their groups are stored for each."""
