"""Memory that a trainer shares with the workers of one host: files in /dev/shm of this user, which
go with the trainer.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from quire.errors import InvalidParameter
from quire.processes.held_files import hold_open, left_behind

HANDLE_KEY = "quire:host"
"""The key of a handle, where others have the id of a GPU."""
_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"quire-weights-[0-9a-f]{16}(-lasting)?")
_ALIGNED = 64
"""Tensors begin at multiples of this."""


_LIVE: WeakSet[SharedBuffer] = WeakSet()
"""The buffers of this process."""


class SharedBuffer:
    """A buffer that the trainer writes. Closing it, or the end of the program, frees the memory;
    the name of a trainer that was killed is removed by the next one.
    """

    def __init__(self, nbytes: int, *, lasts: bool = False) -> None:
        """With `lasts` it is used in one update after the other, and workers keep it mapped between
        them. Raises OSError where there is no room.
        """
        _remove_orphans()
        self.nbytes = max(1, nbytes)
        name = f"quire-weights-{secrets.token_hex(8)}"
        self._path = _FOLDER / (name + "-lasting" * lasts)
        fd = _made(self._path)
        try:
            # pages that are only found missing when they are written would end the process
            os.posix_fallocate(fd, 0, self.nbytes)
            self._pages = mmap.mmap(fd, self.nbytes)  # has a copy of the descriptor
        except BaseException:
            self._path.unlink()
            raise
        finally:
            os.close(fd)
        self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._remove = finalize(self, _remove_own, self._path, os.getpid())
        _LIVE.add(self)

    def write(self, at: int, tensor: Tensor) -> dict[str, Any]:
        """Copy a tensor's bytes to a place, and return its handle."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._bytes[at : at + len(data)].copy_(data)
        return self.handle(at, len(data))

    def handle(self, at: int = 0, nbytes: int | None = None) -> dict[str, Any]:
        """The handle of a part, for a worker: plain values."""
        size = self.nbytes - at if nbytes is None else nbytes
        return {HANDLE_KEY: [self._path.name, at, size]}

    def view(self, at: int, like: Tensor) -> Tensor:
        """A tensor of this shape and type in the buffer. Its place is a multiple of its items'
        size.
        """
        return self._bytes[at : at + like.nbytes].view(like.dtype).view(like.shape)

    def place_of(self, tensor: Tensor) -> int | None:
        """The place of a tensor in the buffer; None: it lies elsewhere."""
        at = tensor.data_ptr() - self._bytes.data_ptr()
        is_here = at >= 0 and at + tensor.nbytes <= self.nbytes
        return at if is_here and tensor.is_contiguous() else None

    def close(self) -> None:
        """Free the memory once nobody has it mapped."""
        _LIVE.discard(self)
        self._remove()


def handle_of(tensor: Tensor) -> dict[str, Any] | None:
    """The handle of a tensor that lies in one of this process' buffers as it is; None: it does
    not.
    """
    for buffer in _LIVE:
        if (at := buffer.place_of(tensor)) is not None:
            return buffer.handle(at, tensor.nbytes)
    return None


class SharedViews:
    """A worker's view of such buffers. One that lasts is mapped once, as that takes as long as
    copying it.
    """

    def __init__(self) -> None:
        self._pages: dict[str, mmap.mmap] = {}

    def read(self, handle: object, nbytes: int) -> Tensor:
        """The bytes [n] of a handle where they are. Raises InvalidParameter for another count, and
        for a handle that names no such memory of this user.
        """
        if not (
            isinstance(handle, list | tuple)
            and len(handle) == 3
            and isinstance(handle[0], str)
            and _NAME.fullmatch(handle[0])
            and all(isinstance(n, int) and n >= 0 for n in handle[1:])
        ):
            raise InvalidParameter("ipc_handles", handle, "[name, offset, bytes] of shared memory")
        name, at, size = handle
        if nbytes != size:
            raise InvalidParameter("ipc_handles", size, f"{nbytes} bytes, as the shapes say")
        pages = self._pages.get(name)
        if pages is None:
            pages = self._pages[name] = _map(name)
        if at + size > len(pages):
            raise InvalidParameter("ipc_handles", handle, f"it has {len(pages)} bytes")
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=at)

    def end_update(self) -> None:
        """Forget those that do not last or are gone. Pages go with their last tensor."""
        for name in list(self._pages):
            if not name.endswith("-lasting") or not (_FOLDER / name).exists():
                del self._pages[name]

    def close(self) -> None:
        """Forget all of them."""
        self._pages.clear()


def _map(name: str) -> mmap.mmap:
    try:
        fd = os.open(_FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise InvalidParameter("ipc_handles", name, f"it cannot be opened ({error})") from error
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            raise InvalidParameter("ipc_handles", name, "memory of this user")
        # private, which torch takes as writable: nothing is written
        return mmap.mmap(fd, about.st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)


def aligned(nbytes: int) -> int:
    """The room that a tensor takes."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _remove_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of the trainer
        path.unlink(missing_ok=True)


def _made(path: Path) -> int:
    """A new file, which this process holds."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        hold_open(fd)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # before it was held, another trainer has taken it for left behind


def _remove_orphans() -> None:
    """Remove the names of trainers of this user that died."""
    for path in _FOLDER.glob("quire-weights-*"):
        if not _NAME.fullmatch(path.name):
            continue
        with left_behind(path) as is_left, suppress(OSError):
            if is_left:
                path.unlink()
