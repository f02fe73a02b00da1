"""Writes checkpoints as mlx-lm does: every matrix, the embedding and the head too, in words of
packed codes with a scale and a bias for each group. Shares nothing with the reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MATRICES = re.compile(r".*\.layers\.\d+\..*proj\.weight|.*embed_tokens\.weight|lm_head\.weight")
"""Names of the weights that are quantised."""


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [out, in] as one stream of bits for each row, in words of 32."""
    stream = (codes[..., None] >> np.arange(bits)) & 1
    bytes_ = np.packbits(stream.reshape(len(codes), -1).astype(np.uint8), 1, "little")
    return bytes_.view("<u4")


@dataclass(frozen=True)
class Mlx:
    """Codes in groups; a scale may be negative, and biases are not multiples of it."""

    bits: int = 4
    group: int = 32
    overrides: dict[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """Of config.json, which has it as `quantization` and as `quantization_config`."""
        own = self.overrides or {}
        return {"group_size": self.group, "bits": self.bits, "mode": "affine"} | own

    def made(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors of a weight, and the weight that they stand for."""
        w = weight.double().numpy()
        groups = w.reshape(len(w), -1, self.group)
        low, high = groups.min(2), groups.max(2)
        is_down = np.abs(high) > np.abs(low)  # codes run from the end of larger magnitude
        scales = (high - low) / (2**self.bits - 1) * np.where(is_down, -1, 1)
        scales = scales.astype(np.float16).astype(np.float64)
        biases = np.where(is_down, high, low).astype(np.float16).astype(np.float64)
        found = np.round((groups - biases[..., None]) / scales[..., None])
        codes = np.clip(found, 0, 2**self.bits - 1).astype(np.int64)
        plain = codes * scales[..., None] + biases[..., None]
        words = packed(codes.reshape(w.shape), self.bits)
        parts = {
            "weight": torch.from_numpy(words.astype(np.uint32)),
            "scales": torch.from_numpy(scales).half(),
            "biases": torch.from_numpy(biases).half(),
        }
        return parts, torch.from_numpy(plain.reshape(w.shape).astype(np.float32))


SIZES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Bits and inputs of a group."""


@dataclass(frozen=True)
class Floats:
    """Floats of e2m1 or e4m3 in groups, with scales of powers of two or in e4m3."""

    mode: str

    @property
    def config(self) -> dict[str, Any]:
        """See `Mlx`."""
        bits, group = SIZES[self.mode]
        return {"group_size": group, "bits": bits, "mode": self.mode}

    def made(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors of a weight, and the weight that they stand for."""
        bits, group = SIZES[self.mode]
        groups = weight.float().unflatten(1, (-1, group))
        largest = groups.abs().amax(2, keepdim=True)
        if self.mode == "nvfp4":
            stored = (largest / 6).to(torch.float8_e4m3fn)
            scales = stored.float()
        else:
            exponents = (largest / (6 if bits == 4 else 448)).log2().ceil()
            stored, scales = (exponents + 127).to(torch.uint8), 2.0**exponents
        ratios = groups / scales
        if bits == 8:
            numbers = ratios.to(torch.float8_e4m3fn)
            codes, plain = numbers.view(torch.uint8), numbers.float() * scales
        else:
            sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            nearest = (ratios.abs()[..., None] - sizes).abs().argmin(-1)
            codes = nearest + 8 * (ratios < 0)
            plain = sizes[nearest] * ratios.sign() * scales
        words = packed(codes.flatten(1).long().numpy(), bits)
        parts = {
            "weight": torch.from_numpy(words.astype(np.uint32)),
            "scales": stored.squeeze(2).view(torch.uint8),
        }
        return parts, plain.flatten(1)
