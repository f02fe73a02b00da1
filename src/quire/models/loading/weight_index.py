"""The index of weights in several files, whose names are not trusted. Free of torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.errors import CorruptCheckpoint
from quire.text.model_files import has_file, read_text

_MOST_INDEX_BYTES = 64 << 20
"""Most bytes of an index, some five times those of the largest published ones."""
_MOST_INDEX_NAMES = 1_000_000
"""Most names of tensors; each takes some 200 bytes of memory."""
_LONGEST_NAME = 255
"""Longest name of a file or a tensor."""


class _Index(msgspec.Struct):
    """The part of an index that is read; the rest of the file is not built."""

    weight_map: dict[str, str]


def read_index(path: Path, ending: str) -> dict[str, str] | None:
    """Tensor name -> name of its file in the same folder, which has this ending; None without an
    index.

    Raises CorruptCheckpoint for anything else.
    """
    if not has_file(path, _MOST_INDEX_BYTES):
        return None
    text = read_text(path, _MOST_INDEX_BYTES)
    # colons bound the entries before any of them takes memory
    if text.count(":") > _MOST_INDEX_NAMES:
        raise CorruptCheckpoint(f"{path} is not a weight index: it has too many entries.")
    try:
        found = msgspec.json.decode(text, type=_Index).weight_map
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not a weight index: {error}.") from error
    if not all(_is_file_name(file, ending) for file in set(found.values())):
        raise CorruptCheckpoint(
            f"{path}: weight_map must map tensor names to file names in its folder that end with "
            f"{ending}."
        )
    for name in found:
        check_name(path, name)
    return found


def check_name(file: Path, name: str) -> None:
    """Raise CorruptCheckpoint for a tensor's name that no message could show."""
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise CorruptCheckpoint(
            f"{file} has a tensor whose name is longer than {_LONGEST_NAME} characters or cannot "
            f"be printed: {name[:60]!r}..."
        )


def _is_file_name(value: str, ending: str) -> bool:
    """Whether it is a name in the index's own folder, and one that a file can have."""
    if not value.isprintable() or len(value.encode()) > _LONGEST_NAME:
        return False
    return Path(value).name == value and value.endswith(ending)
