"""The source of a grammar: a value that is equal for requests with the same form."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.grammar.json_schema.openness import Openness
from quire.params import StructuredOutputsParams

WHITESPACE = r"[ \n]"
"""Whitespace between two tokens of JSON, once: a model could write nothing else."""


class GrammarSource(msgspec.Struct, frozen=True):
    """A requested form. `whitespace` "": none between tokens; `openness`: see `Openness`."""

    kind: str
    text: str
    whitespace: str = WHITESPACE
    openness: str = Openness.CLOSED.value

    @property
    def digest(self) -> bytes:
        """Equal for equal sources."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class LoweredSource(msgspec.Struct, frozen=True):
    """A form as libraries compile it. `kind` is that of the requested form, or

    schema: a JSON schema of keywords that libraries enforce whole; `json_options` are those of
    llguidance for it; lark: a grammar in Lark's notation.

    `unenforced`: pointers to the keywords of the form's schemas that are annotations.
    """

    kind: str
    text: str
    whitespace: str = WHITESPACE
    json_options: dict[str, Any] = {}
    unenforced: tuple[str, ...] = ()


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
        schema = params.json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return GrammarSource(kind, text, whitespace, _openness(params))
    if kind == "choice":
        return GrammarSource(kind, json.dumps(params.choice))
    if kind == "structural_tag":
        assert params.structural_tag is not None
        return GrammarSource(kind, params.structural_tag, whitespace, _openness(params))
    return GrammarSource(kind, getattr(params, kind), whitespace)


def _openness(params: StructuredOutputsParams) -> str:
    if params.disable_additional_properties:
        openness = Openness.SHUT
    else:
        openness = Openness.OPEN if params.allow_additional_properties else Openness.CLOSED
    return str(openness.value)


def with_defaults(
    params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> StructuredOutputsParams:
    """Complete a request's form with the engine's settings for all forms."""
    is_json = params.kind in ("json", "json_object", "structural_tag")
    # a request's own rule comes before the engine's
    if config.disable_any_whitespace and is_json and params.whitespace_pattern is None:
        params = msgspec.structs.replace(params, disable_any_whitespace=True)
    if config.disable_additional_properties and not params.allow_additional_properties:
        params = msgspec.structs.replace(params, disable_additional_properties=True)
    elif config.allow_additional_properties and not (
        params.disable_additional_properties or params.allow_additional_properties is False
    ):
        params = msgspec.structs.replace(params, allow_additional_properties=True)
    if config.enable_in_reasoning and params.starts_after is not None:
        params = msgspec.structs.replace(params, starts_after=None, opens_with=None)
    return params
