"""The safetensors files of a model folder as one exact set of named tensors, mapped into memory and
never trusted.

Which files count: those of the index (`model.safetensors.index.json`) if there is one, else
`model.safetensors`, else the only `*.safetensors` file; Mistral's own releases have other names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import CorruptCheckpoint, LoadError, WeightMismatch
from quire.models.loading.folder_files import read_header
from quire.models.loading.weight_index import check_name, read_index
from quire.text.model_files import has_file

_NO_ROOM = "unable to mmap"
"""Words of torch where the system has no room for a file."""
_REMAP_BYTES = (
    256 << 20
)  # mapped bytes after which a file is mapped again, so that read weights do not stay resident


@dataclass(frozen=True, slots=True)
class FileNames:
    """The names of a checkpoint's files: of the file that has all weights, of any other one, and of
    the index that says which belong together; without such names (None) all files do. Those that
    begin with `other` are another copy of the weights.
    """

    index: str | None
    whole: str | None
    pattern: str
    other: str = "-"


HUGGING_FACE = FileNames(
    "model.safetensors.index.json", "model.safetensors", "*.safetensors", "consolidated"
)
MISTRAL = FileNames(
    "consolidated.safetensors.index.json", "consolidated.safetensors", "consolidated*.safetensors"
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor's place and its header's claims, checked against the file's size."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class CheckpointFiles:
    """Read access by tensor name. One file is mapped at a time, and for as long as it is held."""

    def __init__(self, folder: Path, names: FileNames = HUGGING_FACE) -> None:
        """List every tensor. Raises CorruptCheckpoint, WeightMismatch or LoadError with a file."""
        self.entries: dict[str, TensorEntry] = {}
        self._open: tuple[Path, Any] | None = None
        self._read_bytes = 0
        path = None if names.index is None else folder / names.index
        index = None if path is None else read_index(path, ".safetensors")
        found = sorted(f for f in folder.glob(names.pattern) if not f.name.startswith(names.other))
        for file in weight_files(folder, names, index, found):
            self._list(file)
        if path is not None and index is not None:
            check_index(path, index, self.entries)

    def read(self, name: str) -> Tensor:
        """A view of the mapped file in the stored dtype."""
        return self._read(name, lambda handle: handle.get_tensor(name))

    def read_row(self, name: str, index: int) -> Tensor:
        """The part of a tensor at an index of its first axis."""
        return self._read(name, lambda handle: handle.get_slice(name)[index])

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        entry = self.entries[name]
        try:
            tensor = read(self._handle(entry.file))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{entry.file}: {name} cannot be read: {error}") from error
        self._read_bytes += tensor.nbytes
        return tensor

    def close(self) -> None:
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
                check_name(file, name)
                part = handle.get_slice(name)
                if name in self.entries:
                    raise WeightMismatch(
                        f"{name} is stored twice, in {self.entries[name].file.name} and "
                        f"in {file.name}."
                    )
                self.entries[name] = TensorEntry(file, tuple(part.get_shape()), part.get_dtype())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if not has_file(file, None):
        raise CorruptCheckpoint(f"{file} is missing, though the index names it.")
    try:
        header = read_header(file)
        with safe_open(file, "pt") as handle:
            # of two tensors of one name a parser keeps one in silence
            if header.count(b'"data_offsets"') != len(handle.keys()):
                raise SafetensorError("a name is there twice")
            yield handle
    except (SafetensorError, OSError, RuntimeError) as error:
        if _NO_ROOM in str(error):
            raise LoadError(
                f"{file} cannot be mapped: the system maps no file of {file.stat().st_size} bytes "
                "for a process that may take less memory. Raise the limit, or store the weights in "
                "smaller files, as save_pretrained(max_shard_size=...) of transformers does."
            ) from error
        raise CorruptCheckpoint(
            f"{file} is not a valid safetensors file ({error}). It may be an incomplete download: "
            "fetch it again."
        ) from error


def check_index(path: Path, index: dict[str, str], entries: Mapping[str, TensorEntry]) -> None:
    """Raise WeightMismatch unless each tensor is where the index says."""
    for name, file in index.items():
        entry = entries.get(name)
        if entry is None or entry.file != path.parent / file:
            found = "in no file" if entry is None else f"in {entry.file.name}"
            raise WeightMismatch(f"{path.name} promises {name} in {file}, but it is {found}.")


def weight_files(
    folder: Path, names: FileNames, index: dict[str, str] | None, found: list[Path]
) -> list[Path]:
    """Files with the weights, `found` where neither an index nor a name says it. Raises
    LoadError where there is none, or nothing says which of several belong together.
    """
    if index is not None:
        return [folder / name for name in sorted(set(index.values()))]
    if names.whole is not None and has_file(folder / names.whole, None):
        return [folder / names.whole]
    if not found:
        raise LoadError(f"{folder} has no weights in {names.pattern}.")
    if len(found) > 1 and names.index is not None:
        listed = ", ".join(f.name for f in found)
        raise LoadError(
            f"{folder} has {listed}, but no {names.index} that says which belong together."
        )
    return found
