"""Places of tensors in safetensors files, read from the headers alone. Free of torch.

The loader's own reader checks the files. The places here only say which tensors may be packed
before it asks; a file that is not valid has none.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import LoadError
from quire.models.loading.folder_files import read_header
from quire.models.loading.weight_index import read_index

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_SMALL_BYTES = 64 << 10
_LENGTH_BYTES = 8
"""Bytes of the header's length, which precede it."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of a file, which begins `at` bytes into it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    num_bytes: int


def placed_tensors(folder: Path) -> dict[str, PlacedTensor]:
    """The tensors of safetensors files by name; none under other names, or unreadable."""
    try:
        index = read_index(folder / _INDEX, ".safetensors")
        files = sorted(set(index.values())) if index is not None else [_WHOLE]
        return {t.name: t for name in files for t in _tensors_of(folder / name)}
    except (OSError, LoadError, msgspec.MsgspecError, RecursionError):
        return {}


def fetch_small_tensors(folder: Path) -> None:
    """Have the disk read the small tensors of these files, and nothing else, into the page cache.
    For a loader that maps the files and takes only such from them: each of its faults would read
    megabytes around one.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    tensors = placed_tensors(folder).values()  # one file after the other
    for file, own in groupby(tensors, key=lambda t: t.file):
        # places that make no sense are the loader's to refuse
        with contextlib.suppress(OSError, OverflowError), file.open("rb") as stream:
            for t in own:
                if 0 < t.num_bytes <= _SMALL_BYTES:
                    os.posix_fadvise(stream.fileno(), t.at, t.num_bytes, os.POSIX_FADV_WILLNEED)


class Sources:
    """Names of tensors' contents. Another file, or changed contents, has new names."""

    def __init__(self) -> None:
        self._files: dict[Path, str] = {}

    def __call__(self, file: Path, name: str) -> str:
        """The name of a tensor. Raises OSError."""
        if file not in self._files:
            about = file.stat()
            self._files[file] = f"{file}:{about.st_ino}:{about.st_size}:{about.st_mtime_ns}"
        return f"{self._files[file]}#{name}"


def _tensors_of(file: Path) -> list[PlacedTensor]:
    header = read_header(file)
    found: dict[str, Any] = msgspec.json.decode(header)
    found.pop("__metadata__", None)
    start = _LENGTH_BYTES + len(header)
    tensors = msgspec.convert(found, dict[str, _Tensor])
    return [
        PlacedTensor(
            file,
            name,
            t.dtype,
            t.shape,
            start + t.data_offsets[0],
            t.data_offsets[1] - t.data_offsets[0],
        )
        for name, t in tensors.items()
    ]
