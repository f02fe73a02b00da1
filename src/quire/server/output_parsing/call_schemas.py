"""The JSON schemas of forced calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidParameter
from quire.grammar.json_schema.places import open_place


def check_strict(name: str, schema: Mapping[str, Any]) -> None:
    """Raise InvalidParameter of `name` for a schema with open objects that is to be strict."""
    if (pointer := open_place(dict(schema))) is not None:
        allowed = 'with "strict": true no object may have other properties than those declared'
        hint = "Leave out one of the two."
        raise InvalidParameter(f"{name}{pointer}/additionalProperties", True, allowed, hint)


NO_PARAMETERS = {"type": "object", "properties": {}}


def required_schema(tools: Sequence[Mapping[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """Schema of 1 to `max_calls` objects `{"name": ..., "parameters": ...}` of these tools."""
    call = call_schema(tools, "parameters")
    most = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": call["anyOf"]},
            "$defs": call["$defs"]}  # fmt: skip


def call_schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """The schema of `{"name": ..., arguments: ...}` for one of these tools.

    Each tool's schema is a resource of its own, so that references within it stay what they are.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                arguments: {"$ref": f"#/$defs/{index}"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    resources = {
        # numbers, since names of tools may have characters that a JSON pointer would have to escape
        str(index): {"$id": f"urn:tool:{index}", **parameters_of(tool)}
        for index, tool in enumerate(tools)
    }
    return {"anyOf": calls, "$defs": resources}


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object even where it does not say so."""
    return {"type": "object", **(tool["function"].get("parameters") or NO_PARAMETERS)}
