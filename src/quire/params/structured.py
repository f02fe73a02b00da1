"""Parameters for structured outputs, and for ending an output that repeats itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.errors import InvalidParameter, InvalidType
from quire.params import checks

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_WITH_JSON = ("json", "json_object", "structural_tag")
_FLAGS = ("disable_any_whitespace", "disable_additional_properties")
GRAMMAR_FAILED = "the request's grammar failed"
"""Beginning of the error of an output whose grammar proved too large while it ran."""
NO_TOKEN_LEFT = "no token can be drawn: the request's parameters and grammar forbid every one"
"""The error of an output whose request contradicts itself."""
_MAX_CHARS = 2**20
_MAX_CHOICES = 65536
_MAX_DEPTH = {"json": 64, "structural_tag": 80}
"""Bounds on a form as it is written; what it costs to compile is found out by compiling it."""
_MAX_MARK = 64
_MAX_MARKS = 8
_MARKS = (
    f"it must be None, or 1 to {_MAX_MARK} characters or token ids, "
    f"or at most {_MAX_MARKS} such texts"
)
_MAX_COUNT = 2**31 - 1


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, metaclass=checks.CheckedMeta):
    """The form of the output: exactly one of the six kinds.

    The kinds are `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`. `json`
    is a JSON schema (text or dict), `choice` the list of texts to choose from, `grammar` a
    context-free grammar as text (Lark or GBNF), `json_object` any JSON object, `structural_tag` a
    description of tagged parts.

    Between two tokens of JSON there may be one blank or line break; `whitespace_pattern` is a
    regular expression that replaces this, `disable_any_whitespace` allows none.
    An object that declares properties has no others, unless its schema says that it is open;
    `allow_additional_properties` (None: the engine's setting) leaves such objects open, as in the
    standard, and `disable_additional_properties` closes those without declared properties too. With
    `starts_after` the form begins after the first occurrence of this text, of one of these texts,
    or of these token ids in the output (the end of a reasoning), and everything before it is
    unconstrained, except that the text must not end. With `opens_with` the output may begin with
    this text, or one of these, after blanks, and then goes on to `starts_after`; else it begins
    with the form.

    Raises InvalidParameter when no kind or more than one is given, or one cannot be read.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    starts_after: str | list[str | int] | None = None
    opens_with: str | list[str] | None = None
    allow_additional_properties: bool | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            shown = " and ".join(given) or None
            raise InvalidParameter(
                "structured_outputs", shown, f"give exactly one of {', '.join(_KINDS)}"
            )
        self._check(given[0])
        self._check_options(given[0])

    @property
    def kind(self) -> str:
        """The one of the six kinds that is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    def _check(self, kind: str) -> None:
        value = getattr(self, kind)
        name = f"structured_outputs.{kind}"
        if kind == "json_object":
            if value is not True:
                raise InvalidParameter(name, value, "it can only be True", "Leave it out instead.")
        elif kind == "choice":
            self.choice = checks.texts(name, value, _MAX_CHOICES, _MAX_CHARS)
            if not self.choice:
                raise InvalidParameter(name, value, "there must be at least one choice")
        elif kind in _MAX_DEPTH:
            _check_json(name, value, _MAX_DEPTH[kind])
        else:
            _check_text(name, value)
            if kind == "regex" and "\0" in value:
                raise InvalidParameter(name, value, "it must not contain the NUL character")

    def _check_options(self, kind: str) -> None:
        for name in _FLAGS:
            checks.flag(f"structured_outputs.{name}", getattr(self, name))
        if self.allow_additional_properties is not None:
            name = "structured_outputs.allow_additional_properties"
            if checks.flag(name, self.allow_additional_properties) and (
                self.disable_additional_properties
            ):
                allowed = "it goes without disable_additional_properties"
                raise InvalidParameter(name, True, allowed)
        if self.whitespace_pattern is not None:
            name = "structured_outputs.whitespace_pattern"
            if not checks.text(name, self.whitespace_pattern):
                hint = "Set disable_any_whitespace instead."
                raise InvalidParameter(name, "", "it must not be empty", hint)
            if self.disable_any_whitespace or kind not in _WITH_JSON:
                allowed = f"it goes with {', '.join(_WITH_JSON)} and without disable_any_whitespace"
                raise InvalidParameter(name, self.whitespace_pattern, allowed)
        if self.starts_after is not None:
            self.starts_after = _marks("structured_outputs.starts_after", self.starts_after)
        if self.opens_with is not None:
            name = "structured_outputs.opens_with"
            self.opens_with = _texts(name, self.opens_with)
            if not self.ending_texts:
                raise InvalidParameter(name, self.opens_with, "it goes with texts in starts_after")

    @property
    def starts_after_ids(self) -> list[int]:
        """The token ids that the form begins after, if ids are given."""
        given = self.starts_after
        return [one for one in given if isinstance(one, int)] if isinstance(given, list) else []

    @property
    def ending_texts(self) -> tuple[str, ...]:
        """The texts that the form begins after."""
        return _as_texts(self.starts_after)

    @property
    def opening_texts(self) -> tuple[str, ...]:
        """The texts that open what comes before the form, if it need not come."""
        return _as_texts(self.opens_with)


def _as_texts(given: str | Sequence[str | int] | None) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given or ()
    return tuple(one for one in texts if isinstance(one, str))


def _marks(name: str, value: object) -> str | list[str | int]:
    if isinstance(value, str) or (isinstance(value, list | tuple) and not _is_of_ids(value)):
        return _texts(name, value)  # type: ignore[return-value]
    ids = checks.integers(name, value, _MAX_MARK)
    if not ids:
        raise InvalidParameter(name, value, _MARKS)
    return list(ids)


def _is_of_ids(value: Sequence[object]) -> bool:
    return not any(isinstance(one, str) for one in value)


def _texts(name: str, value: object) -> str | list[str]:
    if isinstance(value, str):
        if not 0 < len(checks.text(name, value)) <= _MAX_MARK:
            raise InvalidParameter(name, value, _MARKS)
        return value
    texts = checks.texts(name, value, _MAX_MARKS, _MAX_MARK * _MAX_MARKS)
    if not texts or not all(0 < len(text) <= _MAX_MARK for text in texts):
        raise InvalidParameter(name, value, _MARKS)
    return texts


def _check_text(name: str, value: object) -> None:
    if not checks.text(name, value).strip():
        raise InvalidParameter(name, value, "it must not be empty")
    assert isinstance(value, str)
    if len(value) > _MAX_CHARS:
        shown = f"<{len(value)} characters>"
        raise InvalidParameter(name, shown, f"it may have at most {_MAX_CHARS} characters")


def _check_json(name: str, value: object, max_depth: int) -> None:
    """`value` is a JSON object, as a text or as what such a text means."""
    found = value
    if not isinstance(value, dict):
        _check_text(name, value)
        try:
            found = json.loads(value)  # type: ignore[arg-type]
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(name, value, f"it must be JSON ({error})") from None
        if not isinstance(found, dict):
            raise InvalidParameter(name, value, "it must be a JSON object")
    # before anything recursive sees it
    if not _is_shallow(found, max_depth):
        raise InvalidParameter(name, "...", f"it may be nested at most {max_depth} levels deep")
    if isinstance(value, dict):
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InvalidType(name, value, f"it must be plain JSON data ({error})") from None
        _check_text(name, text)


def _is_shallow(value: object, depth: int) -> bool:
    """Whether lists and dicts are nested at most `depth` deep, found level by level."""
    level = [value]
    for _ in range(depth + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        if not inner:
            return True
        level = inner
    return False


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, metaclass=checks.CheckedMeta):
    """Ends a generation whose last `min_count` blocks of some size are equal.

    Block sizes from `min_pattern_size` (at least 1) to `max_pattern_size` tokens are looked at; a
    `max_pattern_size` of 0 turns the check off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            name = f"repetition_detection.{field}"
            value = getattr(self, field)
            setattr(
                self,
                field,
                checks.integer(name, value, 0, _MAX_COUNT, "it must be an int of at least 0"),
            )
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidParameter(
                "repetition_detection.min_pattern_size",
                self.min_pattern_size,
                f"it must be at most max_pattern_size, which is {self.max_pattern_size}",
            )
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidParameter(
                "repetition_detection.min_count",
                self.min_count,
                "with a max_pattern_size it must be at least 2",
            )
