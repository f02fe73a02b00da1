"""Writes checkpoints as bitsandbytes does, with no part of the reader."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

# of the format, as the library writes them next to the codes
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_SIZES = (0.0, 0.0052083334, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
FP4 = (*_SIZES, *(-size for size in _SIZES))
TABLES = {"nf4": NF4, "fp4": FP4}


def byte_numbers() -> torch.Tensor:
    """Numbers of -1..1 that the bytes of nested scales stand for; any 256 do."""
    return torch.linspace(-1, 1, 256) ** 3


def _nested(scales: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Scales in bytes, less their mean, with scales for every 256: the tensors, what they stand
    for, and what the state says of them.
    """
    offset, table = scales.mean().item(), byte_numbers()
    stored, peaks, plain = [], [], []
    for some in (scales - offset).split(256):
        peaks.append(some.abs().max())
        stored.append((some[:, None] / peaks[-1] - table).abs().argmin(1))
        plain.append(table[stored[-1]] * peaks[-1] + offset)
    parts = {
        "weight.absmax": torch.cat(stored).to(torch.uint8),
        "weight.nested_absmax": torch.stack(peaks),
        "weight.nested_quant_map": table,
    }
    state = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return parts, torch.cat(plain), state


@dataclass(frozen=True)
class InBlocks:
    """A way to write a checkpoint: with a scale for every 64 numbers of the flattened weight."""

    kind: str
    is_nested: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return _config(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_use_double_quant=self.is_nested,
        )

    def made(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors of a weight, and the weight that they stand for."""
        weight = weight.float()
        table = torch.tensor(TABLES[self.kind])
        state: dict[str, Any] = {"quant_type": self.kind, "blocksize": 64, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        blocks = weight.flatten().split(64)
        scales = torch.stack([some.abs().max() for some in blocks])
        parts = {"weight.absmax": scales}
        if self.is_nested:
            parts, scales, more = _nested(scales)
            state |= more
        codes, plain = [], []
        for some, scale in zip(blocks, scales, strict=True):
            codes.append((some[:, None] / scale - table).abs().argmin(1))
            plain.append(table[codes[-1]] * scale)
        flat = torch.cat(codes)
        parts["weight"] = (16 * flat[0::2] + flat[1::2]).to(torch.uint8)[:, None]
        parts["weight.quant_map"] = table
        parts[f"weight.quant_state.bitsandbytes__{self.kind}"] = as_bytes(state)
        return parts, torch.cat(plain).view(weight.shape)


def as_bytes(state: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@dataclass(frozen=True)
class InPeaks:
    """A way to write a checkpoint: whole numbers of a byte, and each output's largest magnitude,
    which is stored as 127. Below the threshold activations are rounded, too.
    """

    threshold: float = 6.0

    @property
    def is_exact(self) -> bool:
        return self.threshold > 0

    @property
    def config(self) -> dict[str, Any]:
        return _config(load_in_8bit=True, llm_int8_threshold=self.threshold)

    def made(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors of a weight, and the weight that they stand for."""
        weight = weight.float()
        peaks = weight.abs().amax(1)
        numbers = (weight * 127 / peaks[:, None]).round()
        parts = {"weight": numbers.to(torch.int8), "SCB": peaks}
        parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return parts, numbers * peaks[:, None] / 127

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The activations x [*, inputs] as a product with such weights has them."""
        peaks = x.abs().amax(-1, keepdim=True)
        return (x * 127 / peaks).round() * peaks / 127


def _config(**keys: Any) -> dict[str, Any]:
    """All keys that the library's users find in a config.json."""
    config = {
        "_load_in_4bit": keys.get("load_in_4bit", False),
        "_load_in_8bit": keys.get("load_in_8bit", False),
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
        "load_in_4bit": False,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
    return config | keys


BLOCK_FORMATS = {
    "bitsandbytes-nf4": InBlocks("nf4"),
    "bitsandbytes-nf4-nested": InBlocks("nf4", is_nested=True),
    "bitsandbytes-fp4": InBlocks("fp4"),
}
PEAK_FORMATS = {
    "bitsandbytes-int8": InPeaks(),
    "bitsandbytes-int8-rows": InPeaks(threshold=0.0),
}
