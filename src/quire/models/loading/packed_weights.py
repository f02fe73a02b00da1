"""Packed weights of earlier starts. Packing copies and rearranges each weight into fresh memory,
which takes most of a start; a start that finds the result in a file maps it, and shares its memory
with other processes that do.

A file's name says what it was made from (quire/executor/packed_file.py). Files that were used
longest ago make room for new ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.hardware.buffer_file import BadFile, map_buffers, mark_used, write_buffers
from quire.hardware.packed_ahead import wait_for_packing
from quire.models.loading.model_parts import tensors_within

logger = logging.getLogger(__name__)

LEAST_BYTES = 64 << 20
"""Smaller models are packed in no time."""
_SPARE_BYTES = 1 << 30
"""Bytes of the disk that no file takes."""
_NICENESS = 10


class WeightCodec(Protocol):
    """Takes a provider's packed weights apart and puts them together: see `CpuWeightCodec`."""

    def take_apart(self, weight: Any) -> tuple[dict[str, Any], dict[str, Tensor]] | None: ...
    def put_together(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Any: ...


class PackedWeights:
    """The packed weights of one model, in one file of a folder. Loading asks `find` for each, and
    `note`s what it has packed itself; `finish` then has a thread write the file.
    """

    def __init__(
        self, find_path: Callable[[], Path | None], codec: WeightCodec, most_bytes: int
    ) -> None:
        """find_path: the file of what the weights would be made from now; None if the model's
        folder cannot be read. It is asked at each loading, as a checkpoint may have changed since
        the last. most_bytes: of all files in the folder.
        """
        self._find_path = find_path
        self._codec = codec
        self._most_bytes = most_bytes
        self._path: Path | None = None
        self._found: dict[str, Any] = {}
        self._noted: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._goes_on = True

    def open(self) -> bool:
        """Map the file, if there is one, and say whether; a damaged one is removed."""
        self._stop()
        self._found, self._noted = {}, {}
        self._path = self._find_path()
        if self._path is None:
            return False
        try:
            pages, places, about = map_buffers(self._path)
        except FileNotFoundError:
            return False
        except (OSError, BadFile) as error:
            logger.warning("Packed weights in %s are not used: %s.", self._path, error)
            with contextlib.suppress(OSError):
                self._path.unlink()
            return False
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
        return True

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
        path = self._find_path()
        if path is None or path != self._path:
            return  # of files that have changed meanwhile
        size = sum(tensor.nbytes for each in noted.values() for tensor in tensors_within(each))
        if not LEAST_BYTES <= size <= self._most_bytes:
            return
        # not a daemon: a program that ends without closing its engine leaves a file, too
        self._goes_on = True
        self._thread = threading.Thread(
            target=self._write, args=(path, noted), name="packed-weights"
        )
        self._thread.start()

    def close(self) -> None:
        """Wait until the file is written: once for a model."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def give_up(self) -> None:
        """Write no more: the weights in memory are about to change."""
        self._stop()

    def _stop(self) -> None:
        """Stop writing what an earlier loading has packed."""
        self._goes_on = False
        self.close()

    def _write(self, path: Path, noted: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            # Linux has a niceness for each thread; other systems would lower the whole process, or
            # have no such ids
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        wait_for_packing()
        if (apart := self._taken_apart(noted)) is None:
            return
        buffers, about = apart
        size = sum(data.nbytes for data in buffers.values())
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # another process that loads the same model may have been faster
            if path.exists() or shutil.disk_usage(folder).free < size + _SPARE_BYTES:
                return
            self._make_room(path, size)
            if write_buffers(path, buffers, about, lambda: self._goes_on):
                logger.info("Packed weights are kept in %s for the next start.", path)
        except OSError as error:
            logger.info("Packed weights are not kept for the next start: %s.", error)

    def _taken_apart(
        self, noted: dict[str, Any]
    ) -> tuple[dict[str, memoryview], dict[str, Any]] | None:
        """The buffers of the weights and the facts about them; None where no file has such, or
        nobody wants it any more.
        """
        about: dict[str, Any] = {}
        buffers: dict[str, memoryview] = {}
        for name, weight in noted.items():
            if not self._goes_on or (apart := self._codec.take_apart(weight)) is None:
                return None
            facts, tensors = apart
            shapes = {}
            for part, tensor in tensors.items():
                shapes[part] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
                data = tensor.contiguous().flatten().view(torch.uint8)
                buffers[f"{name}/{part}"] = data.numpy().data
            about[name] = facts, shapes
        return buffers, about

    def _make_room(self, new: Path, size: int) -> None:
        """Remove the files whose last use is longest ago."""
        files = []
        for path in new.parent.glob("*" + new.suffix):
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
