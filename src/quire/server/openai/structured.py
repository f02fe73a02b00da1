"""Converts the fields that request a certain form of output to the engine's parameters:
`response_format`, `structured_outputs`, and the older `guided_*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.encodable import to_json
from quire.errors import InvalidParameter
from quire.params.structured import StructuredOutputsParams

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""Older field -> the engine's kind."""
_SHORT = {"regex": "regex", "ebnf": "grammar"}
"""SGLang's field -> the engine's kind."""
SHAPE_FIELDS = (
    *("response_format", "structured_outputs", *_GUIDED, "guided_whitespace_pattern"),
    *_SHORT,
)
"""The fields of a request that ask for an output of a certain shape."""
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_KINDS = (*_GUIDED.values(), "structural_tag")


class StructuredFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`structured_outputs` as a request has it."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The schema of a response format."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format`; `structural_tag` has further fields, which are the tag itself."""

    type: str
    json_schema: JsonSchema | None = None


def structured_outputs(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the engine's parameters for the fields of SHAPE_FIELDS that are `given`; None: any
    text. Raises InvalidParameter if there are two such fields, or one has an unknown value.
    """
    asked = [
        ("response_format", _of_format(given.get("response_format"))),
        ("structured_outputs", _of_fields(given.get("structured_outputs"))),
        ("guided_*", _of_guided(given)),
        *((name, {kind: given[name]}) for name, kind in _SHORT.items() if name in given),
    ]
    found = [(name, fields) for name, fields in asked if fields]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidParameter("structured_outputs", names, "one field may ask for a shape")
    return StructuredOutputsParams(**found[0][1])


def _of_guided(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {kind: given[name] for name, kind in _GUIDED.items() if given.get(name) is not None}
    fields = {kind: value for kind, value in fields.items() if value is not False}
    if isinstance(fields.get("json"), dict):
        fields["json"] = _text(fields["json"])
    if "guided_whitespace_pattern" in given and not {"json", "json_object"} & fields.keys():
        pattern = given["guided_whitespace_pattern"]
        allowed = "it goes with guided_json or guided_json_object"
        raise InvalidParameter("guided_whitespace_pattern", pattern, allowed)
    if fields and "guided_whitespace_pattern" in given:
        fields["whitespace_pattern"] = given["guided_whitespace_pattern"]
    return fields


def _of_fields(given: StructuredFields | None) -> dict[str, Any]:
    if given is None:
        return {}
    fields = {name: getattr(given, name) for name in (*_KINDS, *_OPTIONS)}
    for name in ("json", "structural_tag"):
        if isinstance(fields[name], dict):
            fields[name] = _text(fields[name])
    return {name: value for name, value in fields.items() if value is not None}


def _of_format(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        known = msgspec.convert(given, ResponseFormat)
    except msgspec.ValidationError as error:
        raise InvalidParameter("response_format", given, str(error)) from None
    if known.type == "text":
        return {}
    if known.type == "json_object":
        return {"json_object": True}
    if known.type == "json_schema":
        if known.json_schema is None or known.json_schema.schema is None:
            allowed = "json_schema needs json_schema.schema"
            raise InvalidParameter("response_format", given, allowed)
        return {"json": _text(known.json_schema.schema)}
    if known.type == "structural_tag":
        return {"structural_tag": _text(given)}
    allowed = "its type is text, json_object, json_schema or structural_tag"
    raise InvalidParameter("response_format", known.type, allowed)


def _text(value: object) -> str:
    """A schema as text: a dict of a megabyte would be copied and written several times, each of
    which holds up the event loop.
    """
    return to_json(value).decode()
