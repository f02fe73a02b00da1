"""Reads the JSON side files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import LoadError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} when there is no such file; raises LoadError if it is
    anything else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} must hold a JSON object, but it holds a {type(value).__name__}.")
    return value
