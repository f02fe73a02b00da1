"""Folders of LoRA adapters: whether their files are the ones that were read."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quire.errors import RequestError

K = TypeVar("K")
V = TypeVar("V")

_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_model.pt",
)
_MOST_REMEMBERED = 1 << 16
_MOST_ATTEMPTS = 3
_TICK_NS = 100_000_000
"""Resolution of file times: a file that changed within it may change again and keep its time."""

Signature = tuple[tuple[int, ...] | None, ...]
"""Inode, size and times of change of contents and inode of each file; None: it is missing."""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """The contents of a folder: their number, and what shows that they are unchanged (None: they
    may have changed already). `others`: numbers of contents that it had while it was read.
    """

    number: int
    signature: Signature | None
    others: tuple[int, ...] = ()


def signature_of(folder: str) -> Signature | None:
    """Signature of a folder's files, by which they differ from others; None if none is seen."""
    found: list[tuple[int, ...] | None] = []
    for name in _FILES:
        try:
            stat = os.stat(Path(folder) / name)
        except (OSError, ValueError):
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found) if any(found) else None


def read_unchanged(read: Callable[[str], int], folder: str) -> ReadAdapter:
    """Read a folder whose files stay the same meanwhile. `read` gives the contents' number.

    Raises RequestError with one sentence about whatever goes wrong.
    """
    others: list[int] = []
    for _ in range(_MOST_ATTEMPTS):
        now, before = time.time_ns(), signature_of(folder)
        try:
            number = read(folder)
        except (RequestError, MemoryError):
            if signature_of(folder) == before:
                raise
            continue
        if signature_of(folder) == before:
            return ReadAdapter(number, _trusted(before, now), tuple(others))
        others.append(number)
    raise RequestError(f"the files in {folder[:200]} changed while they were read")


def _trusted(signature: Signature | None, now_ns: int) -> Signature | None:
    if signature is None:
        return None
    newest = max(each[-1] for each in signature if each is not None)
    return signature if now_ns - newest > _TICK_NS else None


def remember(known: OrderedDict[K, V], key: K, value: V) -> None:
    """Enter what was seen last, and forget what was seen longest ago once there is too much."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MOST_REMEMBERED:
        known.popitem(last=False)


class KnownFolders:
    """The contents that folders had when they were read last.

    Nothing leads from contents back to a folder: two folders that have the same today may differ
    tomorrow, so weights are only ever read from the folder that a request names.
    """

    def __init__(self) -> None:
        self._folders: OrderedDict[str, ReadAdapter] = OrderedDict()

    def note(self, folder: str, read: ReadAdapter) -> None:
        remember(self._folders, folder, read)

    def forget(self, folder: str) -> None:
        """Have the folder read again, whatever its files look like."""
        self._folders.pop(folder, None)

    def last_number(self, folder: str) -> int | None:
        known = self._folders.get(folder)
        return None if known is None else known.number

    def number(self, folder: str, is_there: Callable[[int], bool]) -> int | None:
        """The number of the folder's contents now; None if it must be read.

        Of a folder that has gone it is the last one, as long as the weights are still there.
        """
        known = self._folders.get(folder)
        if known is None:
            return None
        now = signature_of(folder)
        is_same = is_there(known.number) if now is None else now == known.signature
        return known.number if is_same else None
