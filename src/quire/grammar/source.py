"""The source of a grammar: a value that is equal for requests with the same form."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.params import StructuredOutputsParams

WHITESPACE = r"[ \n]"
"""What may stand between two tokens of JSON, once: a model that writes nothing else fills its
budget with blanks.
"""


class GrammarSource(msgspec.Struct, frozen=True):
    """A requested form. `whitespace` "" allows none between tokens of JSON."""

    kind: str
    text: str
    whitespace: str = WHITESPACE

    @property
    def digest(self) -> bytes:
        """Equal for equal sources."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


def source_of(params: StructuredOutputsParams) -> GrammarSource:
    """The source of a request's form."""
    kind, whitespace = params.kind, WHITESPACE
    if params.disable_any_whitespace:
        whitespace = ""
    elif params.whitespace_pattern is not None:
        whitespace = params.whitespace_pattern
    if kind == "json_object":
        return GrammarSource("json", '{"type":"object"}', whitespace)
    if kind == "json":
        return GrammarSource(kind, _schema_text(params), whitespace)
    if kind == "choice":
        return GrammarSource(kind, json.dumps(params.choice))
    if kind == "structural_tag":
        return GrammarSource(kind, _tag_text(params), whitespace)
    return GrammarSource(kind, getattr(params, kind), whitespace)


def with_defaults(
    params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> StructuredOutputsParams:
    """Complete a request's form with the engine's settings for all forms."""
    is_json = params.kind in ("json", "json_object")
    if config.disable_any_whitespace and is_json and params.whitespace_pattern is None:
        params = msgspec.structs.replace(params, disable_any_whitespace=True)
    if config.disable_additional_properties:
        params = msgspec.structs.replace(params, disable_additional_properties=True)
    if config.enable_in_reasoning and params.starts_after is not None:
        params = msgspec.structs.replace(params, starts_after=None)
    return params


def _schema_text(params: StructuredOutputsParams) -> str:
    schema = params.json
    if params.disable_additional_properties:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        return json.dumps(_closed(parsed))
    return schema if isinstance(schema, str) else json.dumps(schema)


def _tag_text(params: StructuredOutputsParams) -> str:
    text = params.structural_tag
    assert text is not None
    return json.dumps(_closed(json.loads(text))) if params.disable_additional_properties else text


def _closed(schema: Any) -> Any:
    """Close every object of the schema that does not specify whether it is open."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    is_object = schema.get("type") == "object" or isinstance(schema.get("properties"), dict)
    if is_object and not {"additionalProperties", "patternProperties"} & closed.keys():
        closed["additionalProperties"] = False
    return closed
