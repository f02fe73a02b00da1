"""Copies of updated weights as a worker keeps them, in files, for the core that replaces one that
dies.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import WeightUpdateError
from quire.hardware.buffer_file import BadFile, map_buffers, write_buffers

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"([0-9]+)-[0-9a-f]{32}")
_END = ".weights"


class Snapshots:
    """The snapshot of one worker's weights. A thread writes it while the engine goes on; weights
    that change end that.
    """

    def __init__(self, folder: Path, place: str) -> None:
        """`place`: the worker's, in the files' names."""
        self._folder = folder
        self._place = place
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

    def restore(self, token: str, tensors: Sequence[Tensor]) -> str:
        """Copy the weights of an update into these tensors; returns why not, or an empty text."""
        self._path = self._path_of(token)
        try:
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
                logger.info("The updated weights are kept in %s.", path)
        except OSError as error:
            logger.warning("The updated weights are not kept for a core that restarts: %s.", error)

    def _remove_orphans(self) -> None:
        """Remove the files of programs that have ended."""
        for path in self._folder.glob("*" + _END):
            match = _TOKEN.match(path.name)
            # tokens begin with the process id of the program that gave them
            if match is not None and not Path(f"/proc/{match[1]}").exists():
                path.unlink(missing_ok=True)


def _bytes(tensor: Tensor) -> memoryview:
    data = tensor.detach().contiguous().cpu().reshape(-1)
    return data.view(torch.uint8).numpy().data if data.numel() else memoryview(b"")
