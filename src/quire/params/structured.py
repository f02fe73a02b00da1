"""What an output must look like (structured outputs), and when repetition ends it."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.errors import InvalidParameter
from quire.params import checks

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MAX_COUNT = 2**31 - 1


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, metaclass=checks.CheckedMeta):
    """The form of the output: exactly one of the six kinds.

    The kinds are `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`. `json`
    is a JSON schema (text or dict), `choice` the list of texts to choose from, `grammar` a
    context-free grammar in text form, `json_object` any JSON object, `structural_tag` a description
    of tagged parts. Raises InvalidParameter when no kind or more than one is given, or a kind is
    empty.
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

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            shown = " and ".join(given) or None
            raise InvalidParameter(
                "structured_outputs", shown, f"give exactly one of {', '.join(_KINDS)}"
            )
        self._check(given[0])

    def _check(self, kind: str) -> None:
        value = getattr(self, kind)
        name = f"structured_outputs.{kind}"
        if kind == "json_object":
            if value is not True:
                raise InvalidParameter(name, value, "it can only be True", "Leave it out instead.")
        elif kind == "choice":
            if not checks.texts(name, value, 65536, 2**20):
                raise InvalidParameter(name, value, "there must be at least one choice")
        elif not (kind == "json" and isinstance(value, dict)):
            if not checks.text(name, value).strip():
                raise InvalidParameter(name, value, "it must not be empty")
            if kind == "regex" and "\0" in value:
                raise InvalidParameter(name, value, "it must not contain the NUL character")


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
