"""The tensors of an adapter's file, which is never trusted and never mapped: an adapter may be
replaced while an engine reads it, and a file that shrinks under a map kills the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from quire.errors import AdapterNotFound, BadAdapter, LoadError
from quire.models.loading.folder_files import next_header
from quire.models.loading.readers.pickled_files import read_pickle
from quire.text.model_files import has_file

SAFETENSORS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOST_PICKLED_BYTES = 4 << 30
"""All of it is in memory while it is read."""
_HEADER_START = 8
"""Bytes that have the header's length."""


class TensorFile(Protocol):
    """The tensors of one file by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, known before any is read."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor of the caller's own, in its stored dtype. Raises BadAdapter."""
        ...


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFile]:
    """Open an adapter's tensors. Raises AdapterNotFound, or BadAdapter for an unreadable file."""
    try:
        if has_file(folder / SAFETENSORS, None):
            with _opened(folder / SAFETENSORS) as stream:
                yield _Safetensors(folder / SAFETENSORS, stream)
            return
        for name in PICKLES:
            if has_file(folder / name, None):
                yield _Pickled(folder / name)
                return
    except LoadError as error:
        raise BadAdapter(str(error)) from error
    raise AdapterNotFound(f"There is no LoRA adapter in {folder}: it has no {SAFETENSORS}.")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        # opening a pipe that lies here would wait for a writer
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise BadAdapter(f"{path} cannot be read: {error.strerror}.") from error
    with open(opened, "rb") as stream:
        yield stream


@dataclass(frozen=True, slots=True)
class _Place:
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    end: int


class _Safetensors:
    """A safetensors file, of which the header is read and then the tensors that are asked for."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        header = next_header(path, stream)
        size = os.fstat(stream.fileno()).st_size - _HEADER_START - len(header)
        try:
            # json would keep the last of several entries with one name
            found = json.loads(header, object_pairs_hook=_without_twins)
            self._places = {
                name: _place(entry, size) for name, entry in found.items() if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BadAdapter(
                f"{path} is not a valid safetensors file ({error}). It may be an incomplete "
                "download: fetch it again."
            ) from error
        self._begin = _HEADER_START + len(header)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: place.shape for name, place in self._places.items()
        }

    def read(self, name: str) -> Tensor:
        place = self._places[name]
        if place.dtype is None:
            raise BadAdapter(f"{self._path}: {name} has no type of {', '.join(_DTYPES)}.")
        values = bytearray(place.end - place.start)
        self._stream.seek(self._begin + place.start)
        if self._stream.readinto(values) != len(values):  # type: ignore[attr-defined]
            raise BadAdapter(f"{self._path} has become shorter while it was read.")
        return torch.frombuffer(values, dtype=place.dtype).view(place.shape)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _place(entry: Mapping[str, Any], size: int) -> _Place:
    """Place of a tensor, by its entry in the header of a file with `size` bytes of data."""
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError("a shape or a place is not made of whole numbers")
    if not start <= end <= size:
        raise ValueError("a tensor is not within the file")
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError("a tensor has another size than its shape says")
    return _Place(dtype, shape, start, end)


class _Pickled:
    """A file of torch.save, read without running what is in it."""

    def __init__(self, path: Path) -> None:
        if path.stat().st_size > _MOST_PICKLED_BYTES:
            raise BadAdapter(
                f"{path} is larger than {_MOST_PICKLED_BYTES} bytes: save safetensors."
            )
        self._path, self._tensors = path, read_pickle(path, is_mapped=False)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(tensor.shape) for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.dtype not in _DTYPES.values():
            raise BadAdapter(f"{self._path}: {name} has no type of {', '.join(_DTYPES)}.")
        return tensor.clone(memory_format=torch.contiguous_format)
