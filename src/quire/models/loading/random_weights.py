"""Random weights, for benchmarks and tests: fast to draw, and with logits that are not degenerate.

Each leaf depends on (seed, its name) only. Values come from a table of 2^16 normal quantiles
indexed by random 16-bit integers: an order of magnitude faster than drawing normals, and the bits
of bfloat16 at once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quire.models.parameters import Parameter

_PIECE = 1 << 18  # values
_DEVICE_PIECE = 1 << 24
_LOGIT_SPREAD = 2.5  # standard deviation of the logits that the embedding's scale aims at


class RandomLeaves:
    """Draws a leaf as bfloat16, the same for the same seed and name on every machine."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._quantiles = _normal_quantiles()

    def __call__(self, leaf: Parameter) -> Tensor:
        """The leaf's values, in a new tensor."""
        mean, deviation = distribution(leaf)
        table = (self._quantiles * deviation + mean).to(torch.bfloat16)
        bits = table.view(torch.int16).numpy()
        values = np.empty(leaf.size, np.int16)
        for start, indices in self._indices(leaf):
            # `wrap` because numpy fills a buffer first where it checks bounds; 16 bits cannot leave
            # the table
            np.take(bits, indices, out=values[start : start + indices.size], mode="wrap")
        return torch.from_numpy(values).view(torch.bfloat16).view(leaf.shape)

    def _indices(self, leaf: Parameter) -> Iterator[tuple[int, np.ndarray]]:
        """Random 16-bit integers for the leaf's values, in pieces that fit a cache."""
        digest = _digest(self._seed, leaf)
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:8], "little")))
        for start in range(0, leaf.size, _PIECE):
            size = min(_PIECE, leaf.size - start)
            words = generator.integers(0, 1 << 64, -(-size // 4), dtype=np.uint64)
            yield start, words.view(np.uint16)[:size]


class DeviceRandomLeaves:
    """Draws a leaf on a device, in a hundredth of the time that the host needs: the same for the
    same seed, name and kind of device, from the same distribution as `RandomLeaves`.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._quantiles = _normal_quantiles().to(device)

    def __call__(self, leaf: Parameter) -> Tensor:
        """The leaf's values in bfloat16, in a new tensor on the device."""
        mean, deviation = distribution(leaf)
        table = (self._quantiles * deviation + mean).to(torch.bfloat16)
        generator = torch.Generator(self._device)
        # torch's seeds are signed numbers of 64 bits
        generator.manual_seed(int.from_bytes(_digest(self._seed, leaf)[:8], "little") >> 1)
        values = torch.empty(leaf.size, dtype=torch.bfloat16, device=self._device)
        for part in values.split(_DEVICE_PIECE):
            places = torch.randint(
                len(table), part.shape, generator=generator, dtype=torch.int32, device=self._device
            )
            torch.index_select(table, 0, places, out=part)
        return values.view(leaf.shape)


def distribution(leaf: Parameter) -> tuple[float, float]:
    """Mean and standard deviation of a parameter: projections keep the size of their input."""
    if leaf.kind == "matrix":
        return 0.0, 1.0 / math.sqrt(math.prod(leaf.shape[1:]))
    if leaf.kind == "embedding":
        return 0.0, _LOGIT_SPREAD / math.sqrt(leaf.shape[-1])
    if leaf.kind == "decay":
        return 0.0, 1.0
    return (1.0 if leaf.kind == "norm" else 0.0), 0.1


def _digest(seed: int, leaf: Parameter) -> bytes:
    return hashlib.sha256(f"{seed}:{leaf.name}".encode()).digest()


def _normal_quantiles() -> Tensor:
    """The 2^16 quantiles (i + 1/2) / 2^16 of the standard normal distribution, in fp32."""
    middles = (torch.arange(65536, dtype=torch.float64) + 0.5) / 65536
    return torch.special.ndtri(middles).float()
