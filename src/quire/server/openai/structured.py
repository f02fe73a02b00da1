"""Converts the fields that request a certain form of output to the engine's parameters:
`response_format`, `structured_outputs`, and the older `guided_*`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.encodable import to_json
from quire.errors import InvalidParameter
from quire.params.structured import StructuredOutputsParams
from quire.server.output_parsing import check_strict

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
    *("response_format", "structured_outputs", *_GUIDED, *_SHORT),
    "guided_whitespace_pattern",
)
"""The fields of a request that ask for an output of a certain shape."""
_OPTIONS = (
    *("whitespace_pattern", "disable_any_whitespace"),
    *("disable_additional_properties", "allow_additional_properties"),
)
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
    allow_additional_properties: bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The schema of a response format. Its `name`, which may be left out, has no effect."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


_FORMAT_FIELDS = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema",),
}
"""The fields of a response format in addition to its type, by the type; those of `structural_tag`
are the tag itself. `value` is the schema's name in text-generation-inference.
"""


def structured_outputs(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the engine's parameters for the fields of SHAPE_FIELDS that are `given`; None: any
    text. Several may ask for the same form.

    Raises InvalidParameter if they ask for different ones, or one has an unknown value.
    """
    asked = [
        ("response_format", _of_format(given.get("response_format"))),
        ("structured_outputs", _of_fields(given.get("structured_outputs"))),
        ("guided_*", _of_guided(given)),
        *((name, {kind: given[name]}) for name, kind in _SHORT.items() if name in given),
    ]
    found = [(name, StructuredOutputsParams(**fields)) for name, fields in asked if fields]
    if not found:
        return None
    forms = [form for _, form in found]
    if any(_plain(form) != _plain(forms[0]) for form in forms[1:]):
        names = " and ".join(name for name, _ in found)
        allowed = "one field may ask for a form, or several for the same"
        raise InvalidParameter("structured_outputs", names, allowed)
    return forms[0]


def form_field(given: StructuredFields, name: str) -> str:
    """The field of `structured_outputs` that a parameter, perhaps of another kind, came from."""
    asked = [kind for kind in _KINDS if getattr(given, kind) is not None]
    own = name if name in _OPTIONS else next(iter(asked), name)
    return f"structured_outputs.{own}" if own else "structured_outputs"


def dialect_field(parameter: str, names: Mapping[str, str]) -> str:
    """The field of another dialect that a parameter, or a field of chat, was made from: `names` has
    those that it calls differently. Its format has the fields of `json_schema` itself.
    """
    first, _, rest = parameter.partition(".")
    if first == "response_format" and rest:
        return f"{names[first]}.{rest.removeprefix('json_schema.')}"
    return names.get(first, parameter)


def _plain(form: StructuredOutputsParams) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(form)
    for name in ("json", "structural_tag"):
        # as texts, two equal schemas may differ in blanks
        if isinstance(fields.get(name), str):
            fields[name] = json.loads(fields[name])
    return fields


def _of_guided(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {kind: given[name] for name, kind in _GUIDED.items() if given.get(name) is not None}
    # `guided_json_object: false` asks for nothing
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
    kind = given.get("type")
    if kind == "structural_tag":
        return {"structural_tag": _text(given)}
    if kind not in _FORMAT_FIELDS:
        allowed = f"its type is {', '.join(_FORMAT_FIELDS)} or structural_tag"
        raise InvalidParameter("response_format", kind, allowed)
    for name, value in given.items():
        if name not in ("type", *_FORMAT_FIELDS[kind]) and value is not None:
            owners = [each for each, names in _FORMAT_FIELDS.items() if name in names]
            hint = f"It goes with type {owners[0]}." if owners else "Leave it out."
            allowed = f"a format of type {kind} has no such field"
            raise InvalidParameter(f"response_format.{name[:80]}", value, allowed, hint)
    if kind == "json_schema":
        return _of_schema(given)
    if kind == "json_object" and (schema := _schema_of_object(given)) is not None:
        return {"json": schema}
    return {"json_object": True} if kind == "json_object" else {}


def _schema_of_object(given: dict[str, Any]) -> str | None:
    names = [name for name in _FORMAT_FIELDS["json_object"] if given.get(name) is not None]
    schemas = [_checked_schema(f"response_format.{name}", given[name]) for name in names]
    if len(names) > 1 and given[names[0]] != given[names[1]]:
        allowed = f"{names[0]} has another schema"
        raise InvalidParameter(f"response_format.{names[1]}", given[names[1]], allowed)
    return schemas[0] if schemas else None


def _of_schema(given: dict[str, Any]) -> dict[str, Any]:
    try:
        described = msgspec.convert(given.get("json_schema"), JsonSchema)
    except msgspec.ValidationError as error:
        raise InvalidParameter("response_format", given, str(error)) from None
    if described.schema is None:
        allowed = "json_schema needs json_schema.schema"
        raise InvalidParameter("response_format", given, allowed)
    if not described.strict:
        return {"json": _text(described.schema)}
    check_strict("response_format.json_schema.schema", described.schema)
    return {"json": _text(described.schema), "allow_additional_properties": False}


def _checked_schema(name: str, schema: object) -> str:
    if not isinstance(schema, dict):
        raise InvalidParameter(name, schema, "it must be a JSON schema")
    return _text(schema)


def _text(value: object) -> str:
    """A schema as text: copies of a dict of a megabyte would hold up the event loop."""
    return to_json(value).decode()
