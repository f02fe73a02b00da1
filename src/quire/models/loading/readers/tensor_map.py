"""Weights that are in memory already, as files by tensor name: for load formats of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from quire.errors import WeightMismatch
from quire.models.loading.readers.checkpoint_files import TensorEntry
from quire.models.loading.readers.dtype_names import DTYPE_NAMES, dtype_name


class TensorMap:
    """Read access to the host's tensors by checkpoint names. `where`: the place in errors."""

    def __init__(self, tensors: Mapping[str, Tensor], where: Path) -> None:
        """Raises WeightMismatch for a type of numbers that checkpoints do not have."""
        self._tensors = dict(tensors)
        self.entries: dict[str, TensorEntry] = {}
        for name, tensor in self._tensors.items():
            if tensor.dtype not in DTYPE_NAMES:
                raise WeightMismatch(f"{where}: {name} is of the type {tensor.dtype}.")
            self.entries[name] = TensorEntry(where, tuple(tensor.shape), dtype_name(tensor.dtype))

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors.clear()
