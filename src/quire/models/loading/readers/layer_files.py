"""The weights of a folder together with those of layers that have files of their own, such as the
Dense modules of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from quire.errors import LoadError
from quire.models.loading.readers.checkpoint_files import CheckpointFiles, FileNames, TensorEntry
from quire.models.loading.readers.pickled_files import PickledFiles

_BEGINNINGS = ("linear.", "", "dense.")
"""Beginnings of `weight` and `bias` in a layer's file."""


class _Files(Protocol):
    """Reader of the tensors of some files, as `WeightFiles`."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read(self, name: str) -> Tensor: ...

    def close(self) -> None: ...


class LayerFiles:
    """Reads what `files` has, and of each layer's file its `{file}:weight` and `{file}:bias`."""

    def __init__(self, files: _Files, folder: Path, layers: Sequence[str]) -> None:
        """`layers` are paths within `folder`. Raises LoadError for one that holds no layer."""
        self._files = files
        self._layers: dict[str, tuple[_Files, str]] = {}
        self.entries: dict[str, TensorEntry] = dict(files.entries)
        for layer in layers:
            opened = _open(folder / layer)
            beginning = _beginning(folder / layer, opened)
            for name, entry in opened.entries.items():
                own = f"{layer}:{name.removeprefix(beginning)}"
                self._layers[own] = opened, name
                self.entries[own] = entry

    def read(self, name: str) -> Tensor:
        if name not in self._layers:
            return self._files.read(name)
        opened, stored = self._layers[name]
        return opened.read(stored)

    def close(self) -> None:
        self._files.close()
        for opened, _ in self._layers.values():
            opened.close()


def _open(path: Path) -> _Files:
    if path.suffix == ".safetensors":
        return CheckpointFiles(path.parent, FileNames(None, path.name, path.name))
    return PickledFiles(path.parent)


def _beginning(path: Path, opened: _Files) -> str:
    for beginning in _BEGINNINGS:
        if beginning + "weight" in opened.entries:
            return beginning
    raise LoadError(f"{path} has {', '.join(opened.entries)[:200]}, but no weight of a layer.")
