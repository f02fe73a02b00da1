"""The disk that a folder is on: its room, and whether it is one."""

from __future__ import annotations

import shutil
from pathlib import Path

from quire.hardware.topology import Read

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")


def free_disk_bytes(read: Read, folder: Path) -> int:
    """Bytes that can be written in `folder`, which need not exist yet; 0 where files are kept in
    memory, and where no folder can be made.
    """
    place = folder.absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        if _file_system(read("/proc/self/mountinfo"), place.resolve()) in _IN_MEMORY:
            return 0
        return shutil.disk_usage(place).free
    except OSError:
        return 0


def _file_system(mounts: str, place: Path) -> str:
    """The type of the file system of the innermost mount that has `place`; "" if unknown."""
    longest, found = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) < 5 or not after.split():
            continue
        # mountinfo writes blanks so
        point = words[4].replace("\\040", " ")
        if place.is_relative_to(point) and len(point) > longest:
            longest, found = len(point), after.split()[0]
    return found
