"""The pickled weights of a model folder (`pytorch_model.bin`, `*.pt`), read without running what is
in them.

torch's restricted unpickler (`weights_only`) builds tensors and plain containers and nothing else,
after their pickle has been read as data (pickle_scan.py).
Tensors of the zip form stay views of the mapped file; the form from before torch 1.6 takes memory
for one file at a time.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import CorruptCheckpoint, LoadError, WeightMismatch
from quire.models.loading.folder_files import PICKLE_PATTERNS, pickles
from quire.models.loading.readers.checkpoint_files import (
    FileNames,
    TensorEntry,
    check_index,
    weight_files,
)
from quire.models.loading.readers.dtype_names import dtype_name
from quire.models.loading.readers.pickle_archive import (
    MOST_PICKLE_BYTES,
    check_archive,
    is_archive,
)
from quire.models.loading.readers.pickle_scan import scan_pickle
from quire.models.loading.weight_index import check_name, read_index
from quire.text.model_files import has_file

_INDEX = "pytorch_model.bin.index.json"
_NAMES = FileNames(_INDEX, "pytorch_model.bin", " or ".join(PICKLE_PATTERNS))
_NUM_OLD_PICKLES = 5
"""Pickles of a file from before torch 1.6: a magic number, a version, facts about the machine, the
tensors, and the keys of their storages, which follow.
"""


class PickledFiles:
    """Read access by tensor name, with one file open at a time."""

    def __init__(self, folder: Path) -> None:
        """List every tensor. Raises CorruptCheckpoint, WeightMismatch or LoadError with a file."""
        self.entries: dict[str, TensorEntry] = {}
        self._open: tuple[Path, dict[str, Tensor]] | None = None
        index = read_index(folder / _INDEX, ".bin")
        for file in weight_files(folder, _NAMES, index, pickles(folder)):
            for name, tensor in self._tensors(file).items():
                if name in self.entries:
                    other = self.entries[name].file.name
                    raise WeightMismatch(f"{name} is stored twice, in {other} and in {file.name}.")
                entry = TensorEntry(file, tuple(tensor.shape), dtype_name(tensor.dtype))
                self.entries[name] = entry
        if index is not None:
            check_index(folder / _INDEX, index, self.entries)

    def read(self, name: str) -> Tensor:
        return self._tensors(self.entries[name].file)[name]

    def close(self) -> None:
        self._open = None

    def _tensors(self, file: Path) -> dict[str, Tensor]:
        if self._open is None or self._open[0] != file:
            # before the next one is read: the old form takes the memory of a whole file
            self._open = None
            self._open = file, read_pickle(file)
        return self._open[1]


def read_pickle(file: Path, *, is_mapped: bool = True) -> dict[str, Tensor]:
    """The tensors of a file, mapped where possible. Raises CorruptCheckpoint or LoadError."""
    if not has_file(file, None):
        raise CorruptCheckpoint(f"{file} is missing, though {_INDEX} names it.")
    try:
        with file.open("rb") as stream:
            is_zip = is_archive(stream)
            if is_zip:
                check_archive(file, stream, MOST_PICKLE_BYTES)
        if not is_zip:
            _check_old(file)
        is_mapped = is_zip and is_mapped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of storages by type, which old files name
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except LoadError:
        raise
    except Exception as error:  # whatever a lying pickle provokes in torch
        raise CorruptCheckpoint(_why(file, error)) from error
    if not isinstance(found, dict):
        raise LoadError(f"{file} holds a {type(found).__name__}, not a dict of tensors by name.")
    tensors = list(dict.items(found))  # an OrderedDict may have attributes, such as `items`
    for name, tensor in tensors:
        _check_tensor(file, name, tensor)
    return {name: tensor.detach() for name, tensor in tensors}


def _check_old(file: Path) -> None:
    """Raise CorruptCheckpoint for pickles that ask for more than tensors need, for more memory than
    the file has bytes, or for memory that the file does not fill.
    """
    with file.open("rb") as stream:
        found = [scan_pickle(file, stream, MOST_PICKLE_BYTES) for _ in range(_NUM_OLD_PICKLES)]
    storages, keys = found[-2].storages, found[-1].listed
    needed = sum(storage.num_bytes for storage in storages.values())
    if needed > (size := file.stat().st_size):
        raise CorruptCheckpoint(f"{file} has {size} bytes, and the tensors in it need {needed}.")
    stated = {key for key in keys or () if isinstance(key, str)}
    if keys is None or len(keys) != len(storages) or stated != storages.keys():
        raise CorruptCheckpoint(f"{file} does not list the storages of its tensors.")


def _why(file: Path, error: Exception) -> str:
    first = str(error).strip().split("\n", 1)[0][:200]
    return (
        f"{file} is not a valid file of torch.save ({type(error).__name__}: {first}). It may be an "
        "incomplete download: fetch it again."
    )


def _check_tensor(file: Path, name: object, tensor: object) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise LoadError(
            f"{file}: {str(name)[:100]!r} is a {type(tensor).__name__}, and a checkpoint has only "
            "tensors by name. Save the model's state_dict() alone."
        )
    check_name(file, name)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise LoadError(f"{file}: {name} is not a plain tensor with all of its values.")
