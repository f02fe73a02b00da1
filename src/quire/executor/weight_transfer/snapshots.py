"""Copies of updated weights as a worker keeps them, in files, for the core that replaces one that
dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import WeightUpdateError
from quire.hardware.buffer_file import BadFile, map_buffers, write_buffers
from quire.processes.held_files import hold, left_behind

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"[0-9a-f]{32}")
_END, _LEFT = ".weights", ".left"
"""Ends of the names of files that are held, or were when somebody looked last, and of those that
were not.
"""
_GRACE_S = 3600.0
"""Seconds from then on in which the core that replaces a dead one may ask for its file."""


class Snapshots:
    """The snapshot of one worker's weights. A thread writes it while the engine goes on; weights
    that change end that.

    The worker holds its file. One that nobody holds is removed an hour after that was noticed: its
    core has died, and another one may be about to start.
    """

    def __init__(self, folder: Path, place: str, clock: Callable[[], float] = time.time) -> None:
        """`place`: the worker's, in the files' names. `clock`: of the files' times."""
        self._folder = folder
        self._place = place
        self._clock = clock
        self._held: int | None = None
        self._path: Path | None = None
        """The file that is there or will be."""
        self._thread: threading.Thread | None = None
        self._goes_on = True

    def keep(self, token: str, tensors: Iterable[Tensor]) -> None:
        """Write the weights of the update that has this token."""
        self.drop()
        self._path = self._path_of(token)
        buffers = {str(i): _bytes(tensor) for i, tensor in enumerate(tensors)}
        self._goes_on = True
        self._thread = threading.Thread(
            target=self._write, args=(self._path, buffers), name="weight-snapshot", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Write no more: the weights are about to change or to go."""
        self._goes_on = False
        self.settle()

    def settle(self) -> None:
        """Wait until what is being written is there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def drop(self) -> None:
        """Forget the snapshot: the weights are others."""
        self.stop()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def restore(self, token: str, tensors: Sequence[Tensor]) -> str:
        """Copy the weights of an update into these tensors; returns why not, or an empty text."""
        self._path = self._path_of(token)
        try:
            self._hold(self._path)
            pages, places, _ = map_buffers(self._path)
        except FileNotFoundError:
            return "its snapshot was not complete"
        except (OSError, BadFile) as error:
            return f"its snapshot cannot be read ({error})"
        sizes = [places[str(i)][1] if str(i) in places else -1 for i in range(len(tensors))]
        if sizes != [tensor.nbytes for tensor in tensors] or len(places) != len(tensors):
            return "its snapshot has another form"
        for i, tensor in enumerate(tensors):
            at, nbytes = places[str(i)]
            if nbytes:
                data = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=at)
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
        return ""

    def _path_of(self, token: str) -> Path:
        if not _TOKEN.fullmatch(token):
            raise WeightUpdateError(f"{token!r} is not the token of an update.")
        return self._folder / f"{token}-{self._place}{_END}"

    def _write(self, path: Path, buffers: dict[str, memoryview]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_orphans()
            if write_buffers(path, buffers, None, lambda: self._goes_on):
                self._hold(path)
                logger.info("The updated weights are kept in %s.", path)
        except OSError as error:
            logger.warning("The updated weights are not kept for a core that restarts: %s.", error)

    def _hold(self, path: Path) -> None:
        """Hold a file, under its name. Raises FileNotFoundError where there is none."""
        left = path.with_suffix(_LEFT)
        while True:
            with contextlib.suppress(FileNotFoundError):
                left.rename(path)  # it was not held when somebody looked
            try:
                held = hold(path)
                break
            except FileNotFoundError:
                if not left.exists():
                    raise
        if self._held is not None:
            os.close(self._held)
        self._held = held

    def _remove_orphans(self) -> None:
        """Remove the files that nobody has held for an hour, as others and this one have seen."""
        for path in self._folder.glob("*" + _LEFT):
            with left_behind(path) as is_left, contextlib.suppress(OSError):
                # of its change: renaming it was one
                if is_left and self._clock() - path.stat().st_ctime > _GRACE_S:
                    path.unlink()
        for path in self._folder.glob("*" + _END):
            with left_behind(path) as is_left, contextlib.suppress(OSError):
                if is_left:
                    path.rename(path.with_suffix(_LEFT))


def _bytes(tensor: Tensor) -> memoryview:
    data = tensor.detach().contiguous().cpu().reshape(-1)
    return data.view(torch.uint8).numpy().data if data.numel() else memoryview(b"")
