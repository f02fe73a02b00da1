"""The config.json of modules in our formats, as compressed-tensors writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.ops.quantized import WeightFormat

_ROWS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


def quantization_config(formats: Mapping[str, WeightFormat | None]) -> dict[str, Any]:
    """The `quantization_config` of linear modules by name. The format of most of them is that of
    all linear modules; others are named, and those that keep their values are listed to be ignored.
    """
    modules: dict[WeightFormat, list[str]] = {}
    for name, format in formats.items():
        if format is not None:
            modules.setdefault(format, []).append(name)
    most = max(modules, key=lambda format: len(modules[format]))
    groups = {}
    for number, (format, names) in enumerate(sorted(modules.items(), key=lambda m: m[0] == most)):
        targets = ["Linear"] if format == most else names
        groups[f"group_{number}"] = {"targets": targets, **_scheme(format)}
    kinds = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [name for name, format in formats.items() if format is None],
        "kv_cache_scheme": None,
    }


def _scheme(format: WeightFormat) -> dict[str, Any]:
    kind = "float" if format.name == "fp8" else "int"
    weights: dict[str, Any] = {
        "num_bits": 4 if format.name == "int4" else 8,
        "type": kind,
        "symmetric": True,
        "strategy": "group" if format.group else "channel",
        "group_size": format.group or None,
        "dynamic": False,
        "scale_dtype": "torch.bfloat16" if format.name == "int4" else "torch.float32",
    }
    packed = "pack-quantized" if not format.rounds_rows else f"{kind}-quantized"
    rows = {**_ROWS, "type": kind} if format.rounds_rows else None
    return {"format": packed, "weights": weights, "input_activations": rows}
