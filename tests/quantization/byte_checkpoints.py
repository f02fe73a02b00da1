"""Writes checkpoints in bytes as DeepSeek, ModelOpt and compressed-tensors, without the reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class InBytes:
    """A way to write a checkpoint: scales are of blocks [outputs, inputs] (0: all of them).

    are_exponents: scales are powers of two, stored as their exponents. strays: of stored scales
    that are not read. is_exact: activations keep their values. rows: else they have a scale for as
    many inputs (0: all of them), or the stored input_scale.
    """

    config: dict[str, Any]
    block: tuple[int, int] = (0, 0)
    scale: str = "weight_scale"
    shape: tuple[int, ...] | None = None
    is_whole: bool = False
    input_scale: float | None = None
    strays: tuple[str, ...] = ()
    is_exact: bool = False
    rows: int = 0
    are_exponents: bool = False

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The activations x [*, inputs] as a product with such weights has them."""
        most = 127 if self.is_whole else 448
        out = torch.empty_like(x)
        step = self.rows or x.shape[-1]
        for at in range(0, x.shape[-1], step):
            some = x[..., at : at + step]
            peak = some.abs().amax(-1, keepdim=True)
            scale = peak / most if self.input_scale is None else torch.tensor(self.input_scale)
            found = (some / scale).clamp(-most, most)
            numbers = found.round() if self.is_whole else found.to(torch.float8_e4m3fn).float()
            out[..., at : at + step] = numbers * scale
        return out

    def made(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors of a weight, and the weight that they stand for."""
        outputs, inputs = (n or size for n, size in zip(self.block, weight.shape, strict=True))
        scales = torch.empty(-(-weight.shape[0] // outputs), -(-weight.shape[1] // inputs))
        stored = torch.int8 if self.is_whole else torch.float8_e4m3fn
        numbers, plain = torch.empty(weight.shape, dtype=stored), torch.empty(weight.shape)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                at = slice(i * outputs, (i + 1) * outputs), slice(j * inputs, (j + 1) * inputs)
                scale = weight[at].abs().max() / (127.5 if self.is_whole else 448)
                scale = scale.log2().ceil().exp2() if self.are_exponents else scale
                found = weight[at] / scale
                found = found.round().clamp(-128, 127) if self.is_whole else found
                numbers[at], scales[i, j] = found.to(stored), scale
                plain[at] = numbers[at].float() * scale
        shape = scales.shape if self.shape is None else self.shape
        scales = scales.to(torch.float8_e8m0fnu) if self.are_exponents else scales
        parts = {"weight": numbers, self.scale: scales.view(shape)}
        parts |= {name: torch.tensor(1.5) for name in self.strays}
        if self.input_scale is not None:
            parts["input_scale"] = torch.tensor([self.input_scale])
        return parts, plain


def _fp8(**keys: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"} | keys


def _modelopt(algorithm: str) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8",
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.29"},
    }


def _compressed(
    kind: str, weights: dict[str, Any], rows: dict[str, Any] | None, **keys: Any
) -> dict[str, Any]:
    args = {"num_bits": 8, "type": kind, "symmetric": True, "observer": "minmax"}
    scheme = {
        "targets": ["Linear"],
        "weights": args | {"dynamic": False} | weights,
        "input_activations": None if rows is None else args | rows,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    } | keys


_BLOCK = (40, 24)
_TOKEN = {"strategy": "token", "dynamic": True}
_FIXED = {"strategy": "tensor", "dynamic": False}
_CHANNEL = {"strategy": "channel"}
_IN_BLOCKS = {"strategy": "block", "block_structure": list(_BLOCK)}
_OF_GROUPS = {"strategy": "group", "group_size": 24, "dynamic": True}

BYTE_FORMATS: dict[str, InBytes] = {
    "fp8-blocks": InBytes(
        _fp8(weight_block_size=list(_BLOCK)), _BLOCK, "weight_scale_inv", rows=_BLOCK[1]
    ),
    "fp8-blocks-of-exponents": InBytes(
        _fp8(weight_block_size=list(_BLOCK), scale_fmt="ue8m0"),
        _BLOCK,
        "weight_scale_inv",
        rows=_BLOCK[1],
        are_exponents=True,
    ),
    "fp8-blocks-of-deepseek_v4": InBytes(
        _fp8(weight_block_size=list(_BLOCK), scale_fmt="ue8m0"),
        _BLOCK,
        "scale",
        rows=_BLOCK[1],
        are_exponents=True,
    ),
    "fp8-tensor": InBytes(_fp8(), shape=()),
    "fp8-static": InBytes(_fp8(activation_scheme="static"), shape=(1,), input_scale=0.015),
    "modelopt": InBytes(_modelopt("FP8"), shape=(), input_scale=0.015, strays=("k_scale",)),
    "modelopt-channel": InBytes(_modelopt("FP8_PER_CHANNEL_PER_TOKEN"), (1, 0), shape=(-1,)),
    "compressed-float": InBytes(
        _compressed("float", _CHANNEL, _TOKEN), (1, 0), strays=("k_scale", "v_scale")
    ),
    "compressed-float-static": InBytes(
        _compressed("float", {"strategy": "tensor"}, _FIXED), shape=(1,), input_scale=0.015
    ),
    "compressed-float-blocks": InBytes(
        _compressed("float", _IN_BLOCKS, _OF_GROUPS), _BLOCK, rows=_BLOCK[1]
    ),
    "compressed-float-w8a16": InBytes(
        _compressed("float", _IN_BLOCKS, None), _BLOCK, is_exact=True
    ),
    "compressed-int-w8a16": InBytes(
        _compressed("int", _CHANNEL, None), (1, 0), is_whole=True, is_exact=True
    ),
    "compressed-int": InBytes(_compressed("int", _CHANNEL, _TOKEN), (1, 0), is_whole=True),
    "compressed-int-static": InBytes(
        _compressed("int", _CHANNEL, _FIXED), (1, 0), is_whole=True, input_scale=0.05
    ),
}
