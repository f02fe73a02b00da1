"""The folder of the sockets between one front end and its cores, which only this user may enter."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from quire.processes.held_files import hold, left_behind

_PREFIX = "quire-sockets-"
_LONGEST = 100
"""A socket's path has room for 107 bytes."""

_HELD: dict[Path, int] = {}
"""The folders of this process -> what holds them."""


def make_socket_folder() -> Path:
    """A new folder of mode 0700; folders whose process was killed are removed on the way."""
    root = Path(tempfile.gettempdir())
    for old in root.glob(f"{_PREFIX}*"):
        with left_behind(old) as is_left:
            if is_left:
                shutil.rmtree(old, ignore_errors=True)
    folder = _held_folder(root)
    if len(os.fsencode(folder)) + len("/waves-out") > _LONGEST:
        remove_socket_folder(folder)
        folder = _held_folder(Path("/tmp"))
    return folder


def remove_socket_folder(folder: Path) -> None:
    """Remove the folder with its contents; it may have been removed already."""
    shutil.rmtree(folder, ignore_errors=True)
    fd = _HELD.pop(folder, None)
    if fd is not None:
        os.close(fd)


def _held_folder(root: Path) -> Path:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        try:
            _HELD[folder] = hold(folder)
        except FileNotFoundError:
            continue  # before it was held, another program has taken it for left behind
        return folder
