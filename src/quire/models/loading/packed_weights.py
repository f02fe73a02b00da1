"""Packed weights of earlier starts. Packing copies and rearranges each weight into fresh memory,
which takes most of a start; a start that finds the result in a file maps it, and shares its memory
with other processes that do.

A file belongs to everything that it was made from: the model's files by size and time of change,
its config, the recipe, the layout of the kernels, and Quire's own code. Files that were used
longest ago make room for new ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.hardware.buffer_file import BadFile, map_buffers, mark_used, write_buffers

logger = logging.getLogger(__name__)

LEAST_BYTES = 64 << 20
"""Smaller models are packed in no time."""
_SPARE_BYTES = 1 << 30
"""Of the disk, that no file takes."""
_ENDING = ".packed"
_CODE = ("models", "ops", "kernels", "quantization")
"""Folders of the package that decide what a packed weight is."""
_NICENESS = 10


class WeightCodec(Protocol):
    """Takes a provider's packed weights apart and puts them together: see `CpuWeightCodec`."""

    layout: str

    def take_apart(self, weight: Any) -> tuple[dict[str, Any], dict[str, Tensor]] | None: ...
    def put_together(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Any: ...


class PackedWeights:
    """The packed weights of one model, in one file of a folder. Loading asks `find` for each, and
    `note`s what it has packed itself; `finish` then has a thread write the file.
    """

    def __init__(
        self,
        folder: Path,
        key: Callable[[], Mapping[str, Any]],
        codec: WeightCodec,
        most_bytes: int,
    ) -> None:
        """key: what the weights are made from, as JSON. It is asked at each loading, as a
        checkpoint may have changed since the last. most_bytes: of all files in the folder.
        """
        self._folder = folder
        self._key = key
        self._codec = codec
        self._most_bytes = most_bytes
        self._path: Path | None = None
        self._found: dict[str, Any] = {}
        self._noted: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._goes_on = True

    def open(self) -> None:
        """Map the file, if there is one; a damaged one is removed."""
        self._stop()
        self._found, self._noted = {}, {}
        self._path = self._path_now()
        if self._path is None:
            return
        try:
            pages, places, about = map_buffers(self._path)
        except FileNotFoundError:
            return
        except (OSError, BadFile) as error:
            logger.warning("Packed weights in %s are not used: %s.", self._path, error)
            with contextlib.suppress(OSError):
                self._path.unlink()
            return
        mark_used(self._path)
        for name, (facts, tensors) in about.items():
            views = {}
            for part, (dtype, shape) in tensors.items():
                at, nbytes = places[f"{name}/{part}"]
                kind = getattr(torch, dtype)
                count = nbytes // kind.itemsize
                flat = torch.frombuffer(pages, dtype=kind, count=count, offset=at)
                views[part] = flat.view(shape)
            self._found[name] = self._codec.put_together(facts, views)
        logger.info("Packed weights of an earlier start are mapped from %s.", self._path)

    def find(self, name: str) -> Any:
        """The weight of this name; None: it has to be packed."""
        return self._found.pop(name, None)

    def note(self, name: str, weight: Any) -> None:
        """Note a weight that was packed."""
        self._noted[name] = weight

    def finish(self) -> None:
        """Write what was noted, in a thread that leaves the processors to all others."""
        noted, self._noted, self._found = self._noted, {}, {}
        if not noted:
            return
        path = self._path_now()
        if path is None or path != self._path:
            return  # of files that have changed meanwhile
        about: dict[str, Any] = {}
        buffers: dict[str, memoryview] = {}
        for name, weight in noted.items():
            if (apart := self._codec.take_apart(weight)) is None:
                return  # of a kind that no file has
            facts, tensors = apart
            shapes = {}
            for part, tensor in tensors.items():
                shapes[part] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
                data = tensor.contiguous().flatten().view(torch.uint8)
                buffers[f"{name}/{part}"] = data.numpy().data
            about[name] = facts, shapes
        size = sum(data.nbytes for data in buffers.values())
        if LEAST_BYTES <= size <= self._most_bytes:
            # not a daemon: a program that ends without closing its engine leaves a file, too
            self._goes_on = True
            self._thread = threading.Thread(
                target=self._write, args=(path, buffers, about, size), name="packed-weights"
            )
            self._thread.start()

    def close(self) -> None:
        """Wait until the file is written: once for a model."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _stop(self) -> None:
        """Stop writing what an earlier loading has packed."""
        self._goes_on = False
        self.close()

    def _path_now(self) -> Path | None:
        """The file that belongs to what the weights would be made from now; None if the model's
        folder cannot be read.
        """
        try:
            key = self._key()
        except OSError:
            return None
        whole = {"key": key, "layout": self._codec.layout, "code": _code_version()}
        name = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
        return self._folder / (name + _ENDING)

    def _write(self, path: Path, buffers: dict[str, memoryview], about: Any, size: int) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists() or shutil.disk_usage(folder).free < size + _SPARE_BYTES:
                return
            self._make_room(size)
            if write_buffers(path, buffers, about, lambda: self._goes_on):
                logger.info("Packed weights are kept in %s for the next start.", path)
        except OSError as error:
            logger.info("Packed weights are not kept for the next start: %s.", error)

    def _make_room(self, size: int) -> None:
        """Remove the files whose last use is longest ago."""
        files = []
        for path in self._folder.glob("*" + _ENDING):
            with contextlib.suppress(OSError):
                about = path.stat()
                files.append((about.st_atime, about.st_size, path))
        left = self._most_bytes - size - sum(each[1] for each in files)
        for _, freed, path in sorted(files):
            if left >= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                left += freed


def files_key(folder: Path) -> list[list[Any]]:
    """What tells a model folder from one with other contents: its files' names, sizes, and times of
    change; that of the inode cannot be set back.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            about = path.stat()
            found.append([path.name, about.st_size, about.st_mtime_ns, about.st_ctime_ns])
    return [[str(folder.resolve())], *found]


@functools.cache
def _code_version() -> str:
    """Changes with the code that packs, so that a weight of other code is never used: with that of
    this process, which does not change.
    """
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    files = [path for part in _CODE for path in (package / part).rglob("*.py")]
    for path in sorted([*files, *package.glob("_native*")]):
        about = path.stat()
        digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()
