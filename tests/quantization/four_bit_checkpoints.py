"""Writes four-bit floats as compressed-tensors, ModelOpt, gpt-oss, without the reader."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def number(code: int) -> float:
    """That of e2m1: a sign, two bits of exponent, one of mantissa."""
    exponent, half = code // 2 % 4, code % 2 / 2
    size = half if exponent == 0 else (1 + half) * 2 ** (exponent - 1)
    return -size if code >= 8 else size


NUMBERS = torch.tensor([number(code) for code in range(16)])


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes [*, C] as bytes [*, C / 2], the even one in the lower half."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


@dataclass(frozen=True)
class InFourBits:
    """A way to write a checkpoint. names: of the codes, scales and, if scales are e4m3, of the
    factor, by which they are divided if it `divides`.
    """

    config: dict[str, Any]
    names: tuple[str, ...]
    group: int
    divides: bool = False
    strays: tuple[str, ...] = ()

    def made(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors of a weight [outputs, inputs], and the weight that they stand for."""
        groups = weight.split(self.group, 1)
        peaks = torch.stack([some.abs().amax(1) for some in groups], 1)
        factor = 3e-4
        if len(self.names) == 2:
            exponents = peaks.log2().floor() - 2
            stored, scales = (exponents + 127).to(torch.uint8), 2.0**exponents
        else:
            stored = (peaks / 6 / factor).to(torch.float8_e4m3fn)
            scales = stored.float() * factor
        codes, plain = [], []
        for some, scale in zip(groups, scales.T, strict=True):
            distance = (some.unsqueeze(-1) / scale[:, None, None] - NUMBERS).abs()
            codes.append(distance.argmin(-1))
            plain.append(NUMBERS[codes[-1]] * scale[:, None])
        parts = {self.names[0]: packed(torch.cat(codes, 1)), self.names[1]: stored}
        if len(self.names) > 2:
            parts[self.names[2]] = torch.tensor([1 / factor if self.divides else factor])
        return parts | {name: torch.tensor([1.5]) for name in self.strays}, torch.cat(plain, 1)


def _compressed(kind: str, group: int, rows: dict[str, Any] | None) -> dict[str, Any]:
    strategy = "group" if kind == "mxfp4" else "tensor_group"
    args = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    weights = args | {"strategy": strategy, "dynamic": False}
    weights["scale_dtype"] = "torch.uint8" if kind == "mxfp4" else "torch.float8_e4m3fn"
    scheme = {"targets": ["Linear"], "weights": weights, "output_activations": None}
    scheme["input_activations"] = None if rows is None else args | {"strategy": strategy} | rows
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-pack-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}

FOUR_BIT_FORMATS = {
    "mxfp4": InFourBits(_compressed("mxfp4", 32, None), ("weight_packed", "weight_scale"), 32),
    "nvfp4": InFourBits(
        _compressed("nvfp4", 16, {"dynamic": "local"}),
        ("weight_packed", "weight_scale", "weight_global_scale"),
        16,
        divides=True,
        strays=("input_global_scale",),
    ),
    "modelopt-nvfp4": InFourBits(
        _MODELOPT, ("weight", "weight_scale", "weight_scale_2"), 16, strays=("input_scale",)
    ),
}

WIDE_EXPERTS = {"intermediate_size": 96}
"""Keys of a config whose experts divide into groups."""

_OF_EXPERTS = InFourBits({"quant_method": "mxfp4"}, ("blocks", "scales"), 32)


def write_experts(source: Path, target: Path) -> Path:
    """The checkpoint of gpt-oss `source`, whose experts are stored [experts, inputs, outputs], with
    these in blocks; see `coded_checkpoints.write`.
    """
    plain = target / "plain"
    shutil.copytree(source, plain)
    tensors = load_file(source / "model.safetensors")
    coded, values = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        wide = coded.pop(name).transpose(1, 2)
        experts, outputs, inputs = wide.shape
        parts, same = _OF_EXPERTS.made(wide.reshape(-1, inputs))
        shape = experts, outputs, inputs // 32
        coded[name + "_blocks"] = parts["blocks"].view(*shape, 16)
        coded[name + "_scales"] = parts["scales"].view(shape)
        values[name] = same.view(wide.shape).transpose(1, 2).contiguous()
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(coded, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (target / "config.json").write_text(json.dumps(config))
    return plain
