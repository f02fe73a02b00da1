"""The file of `--config`: flags by name in YAML, as the command line would give them."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from quire.errors import InvalidParameter, InvalidType, LoadError
from quire.text.model_files import read_text


def words_of(path: str, flags: Container[str]) -> list[str]:
    """The words of a command line that says what the file says: `port: 80` is `--port=80`.

    A true flag is `--flag`, a false one `--no-flag` (nothing, if that is not one of the `flags`),
    null leaves it out, a list is several words, an object JSON. Raises InvalidParameter for a file
    that cannot be read, is none (a device, a pipe), or is not such a list of names and values.
    """
    import yaml  # only who has a file pays for it

    try:
        content = yaml.safe_load(read_text(Path(path)))
    except (LoadError, yaml.YAMLError, RecursionError) as error:
        raise InvalidParameter("--config", path, " ".join(str(error).split()).rstrip(".")) from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise InvalidType("--config", path, "the file must hold names with values")
    return [word for name, value in content.items() for word in words_for(str(name), value, flags)]


def words_for(name: str, value: Any, flags: Container[str]) -> list[str]:
    """The words that give one name its value; `flags` says which of `--no-...` there are."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if value is True:
        return [flag]
    if value is False:
        negative = "--no-" + flag[2:]
        # a flag that nobody knows is passed on, to be refused by its name
        return [negative] if negative in flags or flag not in flags else []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    # as one word, since a value may begin with a dash
    return [f"{flag}={value}"]
