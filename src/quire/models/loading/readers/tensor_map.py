"""Weights that are in memory already, as files by tensor name: for load formats of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import WeightMismatch
from quire.models.loading.readers.checkpoint_files import TensorEntry

_NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
"""Types of numbers by their names in safetensors files, as layouts of codes ask for them."""


class TensorMap:
    """Read access to tensors of the host by their names in a Hugging Face checkpoint. `where` is
    the file or folder that errors name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], where: Path) -> None:
        """Raises WeightMismatch for a type of numbers that checkpoints do not have."""
        self._tensors = dict(tensors)
        self.entries: dict[str, TensorEntry] = {}
        for name, tensor in self._tensors.items():
            if tensor.dtype not in _NAMES:
                raise WeightMismatch(f"{where}: {name} is of the type {tensor.dtype}.")
            self.entries[name] = TensorEntry(where, tuple(tensor.shape), _NAMES[tensor.dtype])

    def read(self, name: str) -> Tensor:
        """The tensor."""
        return self._tensors[name]

    def close(self) -> None:
        """Let go of the tensors."""
        self._tensors.clear()
