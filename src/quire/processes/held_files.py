"""Files and folders that a process holds for as long as it lives, so that others can tell what was
left behind.

A number of a process says nothing where containers share a folder: each has numbers of its own. A
lock of the kernel is seen by all of them, and ends with the process whatever that died of.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def hold(path: Path) -> int:
    """Hold a file or folder until the descriptor is closed, which every copy of it has to be.
    Raises OSError, FileNotFoundError also where it is removed meanwhile.
    """
    fd = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        hold_open(fd)
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(f"{path} is another one now")
    except BaseException:
        os.close(fd)
        raise
    return fd


def hold_open(fd: int) -> None:
    """Hold a file that this process has open. Where the file system has no locks nobody can, and
    nothing is ever taken for left behind.
    """
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH)


@contextmanager
def left_behind(path: Path) -> Iterator[bool]:
    """Whether no process holds a file or folder; none begins to within the block. False, too, where
    that cannot be said, and for what is another user's.
    """
    try:
        # file systems of a network lock what can be written alone
        mode = os.O_RDONLY if path.is_dir() else os.O_RDWR
        fd = os.open(path, mode | _FLAGS)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = os.path.samestat(os.fstat(fd), os.stat(path))
        except OSError:
            is_free = False
        yield is_free and os.fstat(fd).st_uid == os.getuid()
    finally:
        os.close(fd)
