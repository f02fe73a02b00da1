"""Errors of writing that name the file: the system's own, as of a full disk, do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Have the OSErrors of the block name `file`, if they name none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
