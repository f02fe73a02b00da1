"""Lets pydantic take our values as fields of its models; it is imported by pydantic alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def core_schema_of(kind: type[T]) -> Any:
    """The schema of a Struct for pydantic: an instance as it is, or its fields as a mapping; dumps
    are a dict of the fields that differ from their defaults.
    """
    from pydantic_core import core_schema

    def made(value: object) -> T:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"it must be a {kind.__name__} or a mapping of its fields")
        return kind(**value)

    return core_schema.no_info_plain_validator_function(
        made, serialization=core_schema.plain_serializer_function_ser_schema(_fields_of)
    )


def json_schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a Struct's public fields, complete in itself."""
    _, components = msgspec.json.schema_components([kind], ref_template="{name}")
    own = components[kind.__name__]
    return {
        "title": kind.__name__,
        "description": own.get("description", ""),
        "type": "object",
        "properties": {
            name: _inlined(part, components)
            for name, part in own["properties"].items()
            if name != "type" and name[:1] != "_"
        },
    }


def _inlined(part: Any, components: Mapping[str, Any]) -> Any:
    if isinstance(part, dict):
        if "$ref" in part:
            return _inlined(components[part["$ref"]], components)
        return {key: _inlined(value, components) for key, value in part.items()}
    return [_inlined(each, components) for each in part] if isinstance(part, list) else part


def _fields_of(value: msgspec.Struct) -> dict[str, Any]:
    builtins: dict[str, Any] = msgspec.to_builtins(value)
    return {name: part for name, part in builtins.items() if name != "type" and name[:1] != "_"}


class PydanticField:
    """Methods by which pydantic finds the schemas of the Struct that has them."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[..., Any]) -> Any:
        return core_schema_of(cls)  # type: ignore[type-var]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Callable[..., Any]) -> Any:
        return json_schema_of(cls)  # type: ignore[arg-type]
