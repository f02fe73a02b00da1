"""The reference page of all options, made from their declaration; run as a module to write it."""

from __future__ import annotations

import dataclasses
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.config.environment import VARIABLES
from quire.config.option import Option, default_of, fields_of

_HEAD = """\
# Engine arguments

Made from the declaration in `src/quire/config/engine_args.py` by `python -m
quire.config.reference_page docs/engine_args.md`; do not edit.

Every name is a keyword of `LLM(...)` and `EngineArgs(...)` and a flag of the command line, with
dashes for underscores. Flags that are on or off have a `--no-` twin (but for
`--disable-log-stats`). Sizes may be written as `8k` (8000) or `8K` (8192). Objects are JSON, or
dotted pieces: `--hf-overrides.rope_theta 1e6`. `--explain` prints what became of the wishes, each
value with its reason.
"""
_UNBUILT = """\
## Not built yet

These names are accepted at the values shown, at which they change nothing, so that existing calls
work. Any other value is refused by name.

| name | accepted | what it is | what to do |
| --- | --- | --- | --- |
"""
_ENVIRONMENT = """\
## Environment variables

| name | form | meaning |
| --- | --- | --- |
"""


def render() -> str:
    """The page as Markdown."""
    fields = fields_of(EngineArgs)
    built = [field for field in fields if _option(field).is_built]
    missing = [field for field in fields if not _option(field).is_built]
    groups = [_group(name, list(rows)) for name, rows in groupby(built, lambda f: _option(f).group)]
    variables = "".join(f"| `{v.name}` | {v.form} | {v.help} |\n" for v in VARIABLES)
    unbuilt = _UNBUILT + "".join(map(_unbuilt_row, missing))
    return "\n".join([_HEAD, *groups, unbuilt, _ENVIRONMENT + variables])


def _option(field: dataclasses.Field[Any]) -> Option:
    option: Option = field.metadata["option"]
    return option


def _group(name: str, fields: list[dataclasses.Field[Any]]) -> str:
    head = f"## {name}\n\n| name | value | default | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(map(_row, fields))


def _row(field: dataclasses.Field[Any]) -> str:
    option = _option(field)
    allowed = option.allowed + (f" ({option.unit})" if option.unit else "")
    return f"| `{field.name}` | {allowed} | `{default_of(field)!r}` | {option.help} |\n"


def _unbuilt_row(field: dataclasses.Field[Any]) -> str:
    option = _option(field)
    return f"| `{field.name}` | {option.allowed} | {option.help} | {option.hint} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
