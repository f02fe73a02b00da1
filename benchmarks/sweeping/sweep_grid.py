"""What a sweep tries: sets of parameters for the server and for the load, and which go together."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.args.command_line import parse_any
from quire.config.args.config_file import words_for
from quire.errors import InvalidParameter

NAME_KEY = "_benchmark_name"
_SAFE = re.compile(r"[^A-Za-z0-9._=-]+")
_NAME_CHARS = 60


@dataclass(frozen=True)
class ParameterSet:
    """Values for some flags of a command. `name` is what tables call it."""

    values: Mapping[str, Any]
    given_name: str | None = None

    @property
    def name(self) -> str:
        """The given name, else the values."""
        shown = ", ".join(f"{k}={_text(v)}" for k, v in self.values.items())
        return self.given_name or shown or "default"

    def words(self) -> list[str]:
        """The flags as words of a command line."""
        return [word for k, v in self.values.items() for word in words_for(k, v, ())]

    def folder(self, command: Sequence[str]) -> str:
        """A folder name for what comes of `command` with these values, and of nothing else."""
        exact = json.dumps([list(command), sorted(self.values.items())], default=str)
        digest = hashlib.sha256(exact.encode()).hexdigest()[:8]
        return f"{_SAFE.sub('-', self.name)[:_NAME_CHARS]}-{digest}"


def read_sets(flag: str, file: Path | None, pairs: Sequence[str]) -> list[ParameterSet]:
    """The sets in a JSON or YAML file, each with all values of the `NAME=VALUE,VALUE` pairs.

    A file has a list of objects, or an object of named ones. A list among the values stands for one
    set for each of its items; a list within such a list is one value of several words. Raises
    InvalidParameter.
    """
    further = dict(_pair(flag, pair) for pair in pairs)
    sets: list[ParameterSet] = []
    for name, record in _records(flag, file):
        for key in further.keys() & record.keys():
            raise InvalidParameter(flag, key, "the file has it as well")
        sets += _expanded({**record, **further}, name)
    names = [one.name for one in sets]
    for name in names:
        if names.count(name) > 1:
            raise InvalidParameter(flag, name, "there are two sets of this name")
    return sets


def pairs_of(
    served: Sequence[ParameterSet], sent: Sequence[ParameterSet], links: Sequence[tuple[str, str]]
) -> Iterator[tuple[ParameterSet, list[ParameterSet]]]:
    """Every set of the server with those of the load that have equal values for linked names."""
    for server in served:
        fits = [load for load in sent if all(_is_linked(server, load, link) for link in links)]
        if fits:
            yield server, fits


def parse_links(text: str) -> list[tuple[str, str]]:
    """`a=b,c=d` as pairs of names: a of the server, b of the load."""
    links = [tuple(part.strip().replace("-", "_") for part in word.split("="))
             for word in text.split(",") if word.strip()]  # fmt: skip
    for link in links:
        if len(link) != 2:
            raise InvalidParameter("--link-vars", text, "write NAME=NAME,NAME=NAME")
    return [(link[0], link[1]) for link in links]


def _is_linked(server: ParameterSet, load: ParameterSet, link: tuple[str, str]) -> bool:
    left, right = link
    for one, name in ((server, left), (load, right)):
        if name not in one.values:
            raise InvalidParameter("--link-vars", name, f"{one.name!r} has no such parameter")
    return bool(server.values[left] == load.values[right])


def _records(flag: str, file: Path | None) -> list[tuple[str | None, dict[str, Any]]]:
    """(name, values) of each object in the file; one without values where there is no file."""
    if file is None:
        return [(None, {})]
    content = _read(flag, file)
    if isinstance(content, dict):
        content = [{NAME_KEY: name, **_object(flag, record)} for name, record in content.items()]
    if not isinstance(content, list) or not content:
        allowed = "the file must hold a list of objects, or an object of named ones"
        raise InvalidParameter(flag, str(file), allowed)
    records = [{key.replace("-", "_"): v for key, v in _object(flag, one).items()}
               for one in content]  # fmt: skip
    return [(record.pop(NAME_KEY, None), record) for record in records]


def _read(flag: str, file: Path) -> Any:
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidParameter(flag, str(file), " ".join(str(error).split())) from None


def _object(flag: str, record: Any) -> dict[str, Any]:
    if not isinstance(record, dict) or not all(isinstance(key, str) for key in record):
        raise InvalidParameter(flag, record, "a set is an object of names and values")
    return record


def _pair(flag: str, word: str) -> tuple[str, list[Any]]:
    name, sign, values = word.partition("=")
    if not sign or not name or not values:
        raise InvalidParameter(flag.removesuffix("s"), word, "write NAME=VALUE,VALUE")
    return name.lstrip("-").replace("-", "_"), [parse_any(value) for value in values.split(",")]


def _expanded(values: Mapping[str, Any], name: str | None) -> list[ParameterSet]:
    """One set for each choice of one item from every list."""
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    sets = []
    for choice in itertools.product(*lists.values()):
        chosen = dict(zip(lists, choice, strict=True))
        own = name
        if name is not None and chosen:
            own = f"{name} " + ", ".join(f"{key}={_text(value)}" for key, value in chosen.items())
        sets.append(ParameterSet({**values, **chosen}, own))
    return sets


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)
