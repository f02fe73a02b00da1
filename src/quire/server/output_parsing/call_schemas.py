"""The JSON schemas of forced calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.output_parsing.requested_tools import name_of

NO_PARAMETERS = {"type": "object", "properties": {}}
DATA_KEYS = frozenset({"const", "default", "enum", "examples"})
"""Keys of a schema whose values are data, not schemas."""


def required_schema(tools: Sequence[Mapping[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """The schema of a list of `{"name": ..., "parameters": ...}` of these tools: at least one, at
    most `max_calls`.
    """
    call = call_schema(tools, "parameters")
    most = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": call["anyOf"]},
            "$defs": call["$defs"]}  # fmt: skip


def call_schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """The schema of `{"name": ..., arguments: ...}` for one of these tools.

    Each tool's schema keeps its own references: it is moved below "$defs" as a whole.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name_of(tool)},
                arguments: {"$ref": f"#/$defs/{index}"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    moved = {
        str(index): _moved(parameters_of(tool), f"#/$defs/{index}")
        for index, tool in enumerate(tools)
    }
    return {"anyOf": calls, "$defs": moved}


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object even where it does not say so."""
    return {"type": "object", **(tool["function"].get("parameters") or NO_PARAMETERS)}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references into itself work when it stands at `place` of another."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value.removeprefix("#").rstrip("/")
    return value if key in DATA_KEYS else _moved(value, place)
