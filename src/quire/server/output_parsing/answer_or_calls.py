"""Structured output that may be calls instead: `response_format` with tools by choice."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.grammar.structural_tag import tag_format
from quire.params import StructuredOutputsParams
from quire.server.output_parsing.call_schemas import call_schema
from quire.server.output_parsing.state_table import Reads, ToolFormat


def answer_or_calls(
    schema: Mapping[str, Any],
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    control_tokens: Collection[str],
) -> str | None:
    """The structural tag of an output that is JSON of `schema`, or begins as calls in `tool_format`
    do and then is free. `control_tokens` are those of the tokenizer, which are not text.

    None: calls of this format begin with a control token that a grammar cannot ask for.
    """
    controls = [
        token
        for token in control_tokens
        if token and any(token in text for text in tool_format.delimiters)
    ]
    openings = [text for text in _openings(tool_format) if not _is_beyond_grammars(text, controls)]
    free = {"type": "grammar", "grammar": free_text(controls)}
    calls: list[Mapping[str, Any]] = [
        {"type": "sequence", "elements": [{"type": "const_string", "value": text}, free]}
        for text in openings
    ]
    if tool_format.states[tool_format.start].reads is Reads.ENVELOPE:
        one_call = call_schema(tools, tool_format.argument_keys[-1])
        calls.append({"type": "json_schema", "json_schema": one_call})
    if not calls:
        return None
    answer = {"type": "json_schema", "json_schema": schema}
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "or", "elements": [answer, *calls]}}
    )


def format_of(form: StructuredOutputsParams) -> dict[str, Any]:
    """The form as a format of a structural tag."""
    match form.kind:
        case "json" | "json_object":
            schema = {"type": "object"} if form.json is None else form.json
            schema = json.loads(schema) if isinstance(schema, str) else schema
            return {"type": "json_schema", "json_schema": schema}
        case "regex":
            return {"type": "regex", "pattern": form.regex}
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in form.choice or ()]
            return {"type": "or", "elements": texts}
        case "grammar":
            return {"type": "grammar", "grammar": form.grammar}
    return tag_format(json.loads(form.structural_tag or "{}"))


def _openings(tool_format: ToolFormat) -> list[str]:
    """Texts that begin calls; no brackets, which begin JSON too, unless calls have nothing else."""
    states = tool_format.states
    both = (states[tool_format.start], states["content"])
    found = {text: states[place] for state in both for text, place in state.delimiters.items()}
    found = {text: state for text, state in found.items() if state.reads is not Reads.CONTENT}
    named = [text for text in found if any(char.isalpha() for char in text)]
    return named or [text for text in found if text == "["]


def _is_beyond_grammars(opening: str, controls: Collection[str]) -> bool:
    return any(token in opening and not _has_name(token) for token in controls)


def _has_name(token: str) -> bool:
    """Whether a grammar can ask for a control token: by its name in angle brackets."""
    return token.startswith("<") and token.endswith(">")


def free_text(controls: Sequence[str]) -> str:
    """The grammar of any text, with those control tokens that a grammar can ask for."""
    named = " | ".join(token for token in controls if _has_name(token))
    rules = [f"start: TEXT (control TEXT)*\ncontrol: {named}"] if named else ["start: TEXT"]
    return "\n".join([*rules, "TEXT: /(?s:.*)/"])
