"""The folder of the sockets between one front end and its cores, which only this user may enter."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "quire-"
_LONGEST = 100
"""A socket's path has room for 107 bytes."""


def make_socket_folder() -> Path:
    """A new folder that only this user may enter (mode 0700); folders whose process was killed are
    removed on the way.
    """
    root = Path(tempfile.gettempdir())
    for old in root.glob(f"{_PREFIX}[0-9]*-*"):
        if _is_left_behind(old):
            remove_socket_folder(old)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
    if len(os.fsencode(folder)) + len("/waves-out") > _LONGEST:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
    return folder


def remove_socket_folder(folder: Path) -> None:
    """Remove the folder with its contents; it may have been removed already."""
    shutil.rmtree(folder, ignore_errors=True)


def _is_left_behind(folder: Path) -> bool:
    """Whether it is this user's, and was made by a process that has ended."""
    try:
        is_ours = folder.stat().st_uid == os.getuid()
        pid = int(folder.name.removeprefix(_PREFIX).partition("-")[0])
        if is_ours:
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False
