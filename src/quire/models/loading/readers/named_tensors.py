"""Weights that a program has in memory, instead of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import InvalidType, WeightMismatch
from quire.models.loading.readers.checkpoint_files import TensorEntry
from quire.models.loading.readers.dtype_names import dtype_name

_PLACE = Path("the given weights")


class NamedTensors:
    """Tensors by their names in a Hugging Face checkpoint; they are not copied until they are read.

    Raises InvalidType for what is not a pair of a name and a tensor, WeightMismatch for a name that
    comes twice.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._tensors: dict[str, Tensor] = {}
        for pair in weights:
            match pair:
                case (str(name), torch.Tensor() as tensor):
                    pass
                case _:
                    raise InvalidType("weights_iterator", pair, "pairs of a name and a tensor")
            if name in self.entries:
                raise WeightMismatch(f"{name} is given twice.")
            self._tensors[name] = tensor.detach()
            self.entries[name] = TensorEntry(_PLACE, tuple(tensor.shape), dtype_name(tensor.dtype))

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        """Drop the tensors."""
        self._tensors = {}
