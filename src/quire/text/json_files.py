"""Reads the JSON side files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import LoadError
from quire.text.model_files import MOST_BYTES, has_file, read_text


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} without such a file. Raises LoadError for anything else."""
    if not has_file(path):
        return {}
    value = read_value(path)
    if not isinstance(value, dict):
        raise LoadError(f"{path} must hold a JSON object, but it holds a {type(value).__name__}.")
    return value


def read_plain_json(path: Path) -> dict[str, Any]:
    """As `read_json`, of what can go to the processes of cores; LoadError for other values."""
    value = read_json(path)
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise LoadError(
            f"{path} has a value that is not plain data: a number of more than 64 bits, half a "
            f"character, or too deep a nesting ({error})."
        ) from error
    return value


def read_value(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """The value of the JSON in `path`. Raises LoadError if it cannot be read."""
    text = read_text(path, most_bytes)
    try:
        value = json.loads(text)
        # only an escape can make half of a pair: UTF-8 has none, and most files need no second pass
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a pair
        return value
    except RecursionError:
        raise LoadError(f"{path} cannot be read as JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}.") from error
