"""Memory for weights that is in files: the system writes pages out and reads them again, so that
more weights than memory can be used, at the speed of the disk.

Each piece is a file of its own without a name, so its space is free again when its last tensor is.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

from quire.errors import LoadError

LEAST_BYTES = 1 << 20
"""Fewest bytes of a piece in a file; smaller tensors, as norms, are read in every step anyway."""


def file_pages(folder: Path, num_bytes: int) -> mmap.mmap:
    """Map a new file of zeros. Raises LoadError if the folder cannot be written or is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # without a name: nothing is left, whatever ends the process
        with tempfile.TemporaryFile(dir=folder) as file:
            # a sparse file would end the process by SIGBUS once the disk is full
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED)
    except OSError as error:
        raise LoadError(
            f"No file of {num_bytes / 2**30:.2f} GiB for weights can be made and mapped in "
            f"{folder}: {error.strerror or error}. Set QUIRE_CACHE_DIR to a folder on a disk with "
            "more room."
        ) from error
