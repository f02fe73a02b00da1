"""The key of blocks in a folder that others may write to: only files with its MAC are answers."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from quire.errors import InvalidParameter

_LEAST_BYTES, _MOST_BYTES = 32, 4096


def read_mac_key(where: str, path: Path) -> bytes:
    """The key in a file. Raises InvalidParameter for one others can read, or too short."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())  # of what is read, whatever the path is now
            found = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidParameter(where, str(path), f"a file with a key ({error.strerror})") from None
    if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
        allowed = "a file that no one else can read: it lets others write K/V"
        raise InvalidParameter(where, str(path), allowed, "chmod 600 it.")
    found = found.strip()
    if not _LEAST_BYTES <= len(found) <= _MOST_BYTES:
        allowed = f"a file with {_LEAST_BYTES} to {_MOST_BYTES} bytes"
        raise InvalidParameter(where, str(path), allowed, "Make it by `openssl rand -hex 32`.")
    return hashlib.blake2b(found, digest_size=64, person=b"kv blocks").digest()
