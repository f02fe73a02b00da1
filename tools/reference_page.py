"""The reference pages of the options, made from their declarations; run it to write one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from quire.config.args.engine_options import EngineOptions
from quire.config.args.option import Option, default_of, fields_of
from quire.config.args.server_args import ServerArgs
from quire.environment import VARIABLES

_HEAD = """\
# Engine arguments

Made from the declaration in `src/quire/config/args/engine_options.py` by
`python tools/reference_page.py docs/engine_args.md`; do not edit.

Every name is a keyword of `LLM(...)` and `EngineArgs(...)` and a flag of the command line, with
dashes for underscores. Flags that are on or off have a `--no-` twin (but for
`--disable-log-stats`). Sizes may be written as `8k` (8000) or `8K` (8192). Objects are JSON, or
dotted pieces: `--hf-overrides.rope_theta 1e6`. `--explain` prints the values that were chosen, each
with its reason.
"""
_SERVER_HEAD = """\
# Server arguments

Made from the declaration in `src/quire/config/args/server_args.py` by
`python tools/reference_page.py docs/server_args.md`; do not edit.

Every name is a flag of `quire serve`, with dashes for underscores, next to those of the engine
([engine_args.md](engine_args.md)), and a key of the file of `--config`. [server.md](server.md) says
how the server behaves.
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
    """The page of the engine's options as Markdown."""
    variables = "".join(f"| `{v.name}` | {v.form} | {v.help} |\n" for v in VARIABLES)
    return "\n".join([_HEAD, *_tables(EngineOptions), _ENVIRONMENT + variables])


def render_server() -> str:
    """The page of the server's options as Markdown."""
    return "\n".join([_SERVER_HEAD, *_tables(ServerArgs)])


PAGES: dict[str, Callable[[], str]] = {
    "engine_args.md": render,
    "server_args.md": render_server,
}
"""File name -> the page."""


def _tables(declaration: type) -> list[str]:
    fields = fields_of(declaration)
    built = [field for field in fields if _option(field).is_built]
    missing = [field for field in fields if not _option(field).is_built]
    by_group = sorted(built, key=lambda field: _first_of(built, _option(field).group))
    groups = groupby(by_group, lambda field: _option(field).group)
    unbuilt = _UNBUILT + "".join(map(_unbuilt_row, missing))
    return [*(_group(name, list(rows)) for name, rows in groups), unbuilt]


def _first_of(fields: list[dataclasses.Field[Any]], group: str) -> int:
    return next(i for i, field in enumerate(fields) if _option(field).group == group)


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
    target = Path(sys.argv[1])
    target.write_text(PAGES[target.name](), encoding="utf-8")
