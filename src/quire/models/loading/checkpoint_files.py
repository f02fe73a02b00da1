"""The safetensors files of a model folder as one exact set of named tensors, mapped into memory and
never trusted.

Which files count: those of `model.safetensors.index.json` if there is one, else
`model.safetensors`, else the only `*.safetensors` file. Pickled weights are not read: unpickling
runs code of the file's author.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import CorruptCheckpoint, LoadError, WeightMismatch
from quire.text.json_files import read_value
from quire.text.model_files import has_file

_INDEX = "model.safetensors.index.json"
_MOST_INDEX_BYTES = 64 << 20
"""Some five times the largest published ones."""
_REMAP_BYTES = (
    256 << 20
)  # mapped bytes after which a file is mapped again, so that read weights do not stay resident


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a stored tensor lies and what its header claims; the reader has checked the claim
    against the file's size.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


class CheckpointFiles:
    """Read access by tensor name. One file is mapped at a time; a tensor that is held keeps its
    file mapped.
    """

    def __init__(self, folder: Path) -> None:
        """List every tensor; raises CorruptCheckpoint, WeightMismatch or LoadError, each naming the
        file.
        """
        self.entries: dict[str, TensorEntry] = {}
        self._open: tuple[Path, Any] | None = None
        self._read_bytes = 0
        index = _read_index(folder)
        for file in _weight_files(folder, index):
            self._list(file)
        if index is not None:
            self._check_index(folder, index)

    def read(self, name: str) -> Tensor:
        """A view of the mapped file in the stored dtype."""
        entry = self.entries[name]
        try:
            tensor: Tensor = self._handle(entry.file).get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{entry.file}: {name} cannot be read: {error}") from error
        self._read_bytes += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Close the mapped file."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
        self._open = None

    def _handle(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file or self._read_bytes > _REMAP_BYTES:
            self.close()
            self._open, self._read_bytes = (file, safe_open(file, "pt").__enter__()), 0
        return self._open[1]

    def _list(self, file: Path) -> None:
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (a method, not a mapping)
                part = handle.get_slice(name)
                if name in self.entries:
                    raise WeightMismatch(
                        f"{name} is stored twice, in {self.entries[name].file.name} and "
                        f"in {file.name}."
                    )
                self.entries[name] = TensorEntry(file, tuple(part.get_shape()), part.get_dtype())

    def _check_index(self, folder: Path, index: dict[str, str]) -> None:
        for name, file in index.items():
            entry = self.entries.get(name)
            if entry is None or entry.file != folder / file:
                found = "in no file" if entry is None else f"in {entry.file.name}"
                raise WeightMismatch(f"{_INDEX} promises {name} in {file}, but it is {found}.")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if not has_file(file, None):
        raise CorruptCheckpoint(f"{file} is missing, though {_INDEX} names it.")
    try:
        with safe_open(file, "pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpoint(
            f"{file} is no valid safetensors file ({error}). It may be an incomplete download: "
            "fetch it again."
        ) from error


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / _INDEX
    if not has_file(path, _MOST_INDEX_BYTES):
        return None
    try:
        weight_map = read_value(path, _MOST_INDEX_BYTES)["weight_map"]
    except (LoadError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{path} is no weight index: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(_is_file_name(f) for f in weight_map.values()):
        raise CorruptCheckpoint(f"{path}: weight_map must map tensor names to file names.")
    return weight_map


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value and value.endswith(".safetensors")


def _weight_files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        return [folder / name for name in sorted(set(index.values()))]
    if has_file(folder / "model.safetensors", None):
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(f.name for f in found)
        raise LoadError(f"{folder} has {names}, but no {_INDEX} that says which belong together.")
    raise LoadError(f"{folder} has no safetensors weights.{_pickle_hint(folder)}")


def _pickle_hint(folder: Path) -> str:
    pickled = sorted(f.name for p in ("*.bin", "*.pt", "*.pth") for f in folder.glob(p))
    if not pickled:
        return ""
    return (
        f" {pickled[0]} is a pickle, which can run code and is never read; convert it with "
        "transformers: from_pretrained(...).save_pretrained(...)."
    )
