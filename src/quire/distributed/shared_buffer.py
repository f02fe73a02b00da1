"""Memory that a trainer shares with the workers of one host: files in /dev/shm of this user, which
go with the trainer.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import finalize

import torch
from torch import Tensor

from quire.errors import InvalidParameter

HANDLE_KEY = "quire:host"
"""The key of a handle, where others have the id of a GPU."""
_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"quire-weights-[0-9]+-[0-9a-f]{16}")
_ALIGNED = 64
"""Tensors begin at multiples of this."""


class SharedBuffer:
    """A buffer that the trainer writes. Closing it, or the end of the program, frees the memory;
    the name of a trainer that was killed is removed by the next one.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where there is no room."""
        _remove_orphans()
        self.nbytes = max(1, nbytes)
        self._path = _FOLDER / f"quire-weights-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.nbytes)
            self._pages = mmap.mmap(fd, self.nbytes)
        except BaseException:
            self._path.unlink()
            raise
        finally:
            os.close(fd)
        self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._remove = finalize(self, _remove_own, self._path, os.getpid())

    def write(self, at: int, tensor: Tensor) -> dict[str, Any]:
        """Copy a tensor's bytes to a place, and return its handle."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._bytes[at : at + len(data)].copy_(data)
        return self.handle(at, len(data))

    def handle(self, at: int = 0, nbytes: int | None = None) -> dict[str, Any]:
        """The handle of a part, for a worker: plain values."""
        size = self.nbytes - at if nbytes is None else nbytes
        return {HANDLE_KEY: [self._path.name, at, size]}

    def close(self) -> None:
        """Free the memory once nobody has it mapped."""
        self._remove()


class SharedView:
    """A worker's view of a part of such a buffer."""

    def __init__(self, handle: object) -> None:
        """Raises InvalidParameter for a handle that names no such memory of this user."""
        if not (
            isinstance(handle, list | tuple)
            and len(handle) == 3
            and isinstance(handle[0], str)
            and _NAME.fullmatch(handle[0])
            and all(isinstance(n, int) and n >= 0 for n in handle[1:])
        ):
            raise InvalidParameter("ipc_handles", handle, "[name, offset, bytes] of shared memory")
        name, self._at, self._nbytes = handle
        try:
            fd = os.open(_FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise InvalidParameter("ipc_handles", name, f"it cannot be opened ({error})") from error
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
                raise InvalidParameter("ipc_handles", name, "memory of this user")
            if self._at + self._nbytes > about.st_size:
                raise InvalidParameter("ipc_handles", handle, f"it has {about.st_size} bytes")
            # private, which torch takes as writable: nothing is written
            self._pages = mmap.mmap(fd, about.st_size, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)

    def read(self, nbytes: int) -> Tensor:
        """The bytes [n] where they are. Raises InvalidParameter for another count."""
        if nbytes != self._nbytes:
            raise InvalidParameter(
                "ipc_handles", self._nbytes, f"{nbytes} bytes, as the shapes say"
            )
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=nbytes, offset=self._at)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The pages go with their last tensor."""


def aligned(nbytes: int) -> int:
    """The room that a tensor takes."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _remove_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of the trainer
        path.unlink(missing_ok=True)


def _remove_orphans() -> None:
    """Remove the names of trainers of this user that died."""
    for path in _FOLDER.glob("quire-weights-*"):
        match = _NAME.fullmatch(path.name)
        pid = path.name.split("-")[2] if match else ""
        try:
            if pid and path.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                path.unlink()
        except OSError:
            continue
