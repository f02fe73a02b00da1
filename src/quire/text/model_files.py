"""Opens the files of a model folder without trust in them: only regular files, of a bounded size.

A pipe, a device or a socket in a file's place would be waited for without end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from quire.errors import LoadError

MOST_BYTES = 16 << 20
"""The most bytes of a side file such as config.json: in memory JSON may take 30 times as many."""
MOST_VOCABULARY_BYTES = 256 << 20
"""The most bytes of tokenizer.json, vocab.json and merges.txt; some published have 35 MB."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def has_file(path: Path, most_bytes: int | None = MOST_BYTES) -> bool:
    """Whether there is such a file; nothing is opened. Raises LoadError for a link that leads
    nowhere, for what is not a regular file, and for one of more than `most_bytes` (None: any size).
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        # taken for absent, the rest of the folder would be read as another tokenizer or model
        if path.is_symlink():
            raise LoadError(
                f"{path} is a link to {os.readlink(path)!r}, which is not there."
            ) from None
        return False
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}.") from error
    _check(path, found, most_bytes)
    return True


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """A regular file's text. Raises LoadError for others, above `most_bytes` or not in UTF-8."""
    try:
        # without O_NONBLOCK, opening a pipe waits for a writer
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            _check(path, os.fstat(stream.fileno()), most_bytes)
            # bounded once more: the file may have grown since
            return stream.read(most_bytes).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}.") from error


def _check(path: Path, found: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise LoadError(f"{path} is {kind}, where a file is expected.")
    if most_bytes is not None and found.st_size > most_bytes:
        raise LoadError(
            f"{path} has {found.st_size} bytes, and such a file may have at most {most_bytes}."
        )
