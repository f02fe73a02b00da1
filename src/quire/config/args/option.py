"""One engine option: how its text is read, which values it takes, and the sentence that
documents it.

An option lives in the metadata of the dataclass field that it describes, so that the declaration of
`EngineArgs` is the one source of the checks, the command line and the reference page.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from quire.errors import InvalidParameter, InvalidType, NotBuiltYet

_CLASS = re.compile(r"[^\W\d]\w*([.:][^\W\d]\w*)+")


class Kind(enum.Enum):
    """The shape of an option's value; its text says so in error messages.

    SIZE is an INTEGER that the command line also takes as 1k = 1000 or 1K = 1024.
    """

    TEXT = "a string"
    INTEGER = "an integer"
    SIZE = "an integer "
    NUMBER = "a number"
    FLAG = "True or False"
    OBJECT = "a dict"
    NAMES = "a string or a list of strings"
    NAME_SET = "a string or a list or set of strings"
    CLASS = "a class, or its name as 'module.Class'"
    PROCESSORS = "a list of classes or of 'module:Class' strings"
    TOKEN = "a string, True for the token that huggingface_hub has stored, or False for none"
    OVERRIDES = "a dict, or a callable that takes and returns the dict of config.json"
    ANY = "a value of the reference"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option's contract. `minimum` is inclusive, `above` exclusive; `accepts` (not built) is
    the whole set of values, unless it `only_tunes` other engines: then any value (or choice) is
    accepted, with a warning.

    `refused`: documented values that are not built, and what to do instead; `added`: values that
    plugins bring, which may be among these; where it `takes_classes`, any class is a value, too.
    `hint` ends the text of other errors: what to do instead.
    """

    help: str
    kind: Kind
    group: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    added: Container[str] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    is_optional: bool = False
    is_built: bool = True
    takes_classes: bool = False
    accepts: tuple[object, ...] = ()
    only_tunes: bool = False
    hint: str = ""
    flags: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The values in words, for errors and for the reference page."""
        if self.only_tunes:
            words = " or ".join(self.choices) if self.choices else "any value"
            return f"{words}, which changes nothing"
        if not self.is_built:
            return " or ".join(repr(value) for value in self.accepts)
        words = "one of " + ", ".join(self.choices) if self.choices else self.kind.value.strip()
        signs = ((">=", self.minimum), (">", self.above), ("<=", self.maximum))
        bounds = " and ".join(f"{sign} {bound}" for sign, bound in signs if bound is not None)
        return f"{words} {bounds}".strip() + (", or None" if self.is_optional else "")


@dataclasses.dataclass(frozen=True)
class OptionGroup:
    """Makes the fields below one heading; `facts` are those of `Option`. Default None: optional."""

    heading: str

    def option(self, default: object, help: str, kind: Kind, **facts: Any) -> Any:
        """A dataclass field that carries its `Option`."""
        facts.setdefault("is_optional", default is None)
        metadata = {"option": Option(help, kind, self.heading, **facts)}
        if isinstance(default, dict | list):
            # dataclasses refuse mutable defaults
            return dataclasses.field(default_factory=default.copy, metadata=metadata)
        return dataclasses.field(default=default, metadata=metadata)

    def text(self, default: str | None, help: str, **facts: Any) -> Any:
        return self.option(default, help, Kind.TEXT, **facts)

    def integer(self, default: int | None, help: str, **facts: Any) -> Any:
        return self.option(default, help, Kind.INTEGER, **facts)

    def size(self, default: int | None, help: str, **facts: Any) -> Any:
        """An integer that may be written as 8k or 8K."""
        return self.option(default, help, Kind.SIZE, **facts)

    def number(self, default: float | None, help: str, **facts: Any) -> Any:
        return self.option(default, help, Kind.NUMBER, **facts)

    def flag(self, default: bool | None, help: str, **facts: Any) -> Any:
        """A switch: True or False."""
        return self.option(default, help, Kind.FLAG, **facts)

    def mapping(self, default: dict[str, Any] | None, help: str, **facts: Any) -> Any:
        return self.option(default, help, Kind.OBJECT, **facts)

    def names(self, default: str | None, help: str, **facts: Any) -> Any:
        """A string or a list of strings."""
        return self.option(default, help, Kind.NAMES, **facts)

    def name_set(self, default: str | None, help: str, **facts: Any) -> Any:
        """A string or any number of strings, in no order."""
        return self.option(default, help, Kind.NAME_SET, **facts)


_NOT_BUILT = OptionGroup("Not built yet")


def unbuilt(
    default: object,
    help: str,
    hint: str,
    *also: object,
    flags: tuple[str, ...] = (),
    only_tunes: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field that has a documented name but no implementation: only `default` and the values in
    `also` pass, or with `only_tunes` any value, or any of `choices`.
    """
    # by their texts, since dicts and lists have no hash
    accepts = tuple(dict.fromkeys(map(repr, (default, *also))))
    values = {repr(value): value for value in (default, *also)}
    facts: dict[str, Any] = {"is_built": False, "accepts": tuple(values[text] for text in accepts)}
    facts |= {"only_tunes": only_tunes, "choices": choices}
    return _NOT_BUILT.option(default, help, Kind.ANY, hint=hint, flags=flags, **facts)


def options_of(args: Any) -> dict[str, Option]:
    """Name -> option of an arguments class or object, what is built first."""
    return {field.name: field.metadata["option"] for field in fields_of(args)}


def fields_of(args: Any) -> list[dataclasses.Field[Any]]:
    """The fields of an arguments class or object, what is built first (`model` at the head)."""
    # a stable order: those that are built keep that of their declaration
    return sorted(dataclasses.fields(args), key=lambda field: not field.metadata["option"].is_built)


def tuning_of(args: Any) -> dict[str, str | bool | int | float | None]:
    """Tuning options with a plain value (text, number, boolean, None) that is not the default."""
    given = {name: vars(args)[name] for name, each in options_of(args).items() if each.only_tunes}
    defaults = {field.name: default_of(field) for field in fields_of(args)}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, str | int | float | None) and not _same(value, defaults[name])
    }


def default_of(field: dataclasses.Field[Any]) -> object:
    """The value that a field has when nothing is given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def check(name: str, value: object, option: Option) -> None:
    """Raise InvalidType, InvalidParameter or NotBuiltYet unless `name` may have `value`."""
    if option.takes_classes and _is_class(value):
        return
    if not option.is_built:
        if not option.only_tunes and not is_neutral(value, option):
            raise NotBuiltYet(name, value, option.hint)
        if option.choices and value not in option.choices:
            raise InvalidParameter(name, value, f"it must be one of {', '.join(option.choices)}")
        return
    if value is None and option.is_optional:
        return
    if not _CHECKS[option.kind](value):
        raise InvalidType(name, value, option.allowed, option.hint)
    # before the refused ones: a plugin may bring what is not built here
    if isinstance(value, str) and value in option.added:
        return
    if isinstance(value, str) and value in option.refused:
        raise NotBuiltYet(name, value, option.refused[value])
    if option.choices and value not in option.choices:
        raise InvalidParameter(name, value, option.allowed, option.hint)
    if isinstance(value, int | float) and not _in_bounds(value, option):
        raise InvalidParameter(name, value, option.allowed, option.hint)


def is_neutral(value: object, option: Option) -> bool:
    """Whether a value of an option that is not built changes nothing elsewhere, either."""
    return any(_same(value, neutral) for neutral in option.accepts)


def _same(value: object, neutral: object) -> bool:
    # True equals 1 in Python, and is another answer
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _in_bounds(value: float, option: Option) -> bool:
    return (
        (option.minimum is None or value >= option.minimum)
        and (option.above is None or value > option.above)
        and (option.maximum is None or value <= option.maximum)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_names(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(name, str) for name in value)
    )


def _is_name_set(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple | set | frozenset)
        and all(isinstance(name, str) for name in value)
    )


def _is_class(value: object) -> bool:
    return isinstance(value, type) or (isinstance(value, str) and bool(_CLASS.fullmatch(value)))


def _is_processors(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(p, str | type) for p in value)


_CHECKS: dict[Kind, Callable[[object], bool]] = {
    Kind.TEXT: _is_text,
    Kind.CLASS: _is_class,
    Kind.INTEGER: _is_integer,
    Kind.SIZE: _is_integer,
    Kind.NUMBER: _is_number,
    Kind.FLAG: lambda value: isinstance(value, bool),
    Kind.OBJECT: _is_object,
    Kind.NAMES: _is_names,
    Kind.NAME_SET: _is_name_set,
    Kind.PROCESSORS: _is_processors,
    Kind.TOKEN: lambda value: isinstance(value, bool | str),
    Kind.OVERRIDES: lambda value: callable(value) or _is_object(value),
    Kind.ANY: lambda value: True,
}
