"""Formats of whole outputs besides that of gpt-oss: messages, with headers that say their kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.server.output_parsing.formats.call_tables import marked_parameters
from quire.server.output_parsing.formats.whole_outputs import (
    after_thoughts,
    const,
    one_of,
    sequence,
)
from quire.server.output_parsing.state_table import (
    Head,
    ParserState,
    Reads,
    ReasoningFormat,
    ToolFormat,
)
from quire.server.output_parsing.tool_schemas import ToolSchemas

RECIPIENT = re.compile(r"to=([^\s<]+)")
MUSE_THOUGHT = " to=self<|message|>"
MUSE_ENDS = {"<|eom|>": "after", "<|eot|>": "after", "<|start|>": "head"}


def muse_head(text: str) -> Head:
    """A message's receiver: `to=self` is reasoning, `to=user` and none the answer, else calls."""
    found = RECIPIENT.search(text)
    recipient = "user" if found is None else found[1]
    return Head(then={"self": "reasoning", "user": "content"}.get(recipient, "calls"))


def muse_reader_head(text: str) -> Head:
    """The head of a message where calls are not read: they are content."""
    head = muse_head(text)
    return Head(then="content") if head.then == "calls" else head


def muse_states(head: Callable[[str], Head]) -> dict[str, ParserState]:
    """Messages of Muse Glimmer, whose prompts end with `<|start|>assistant`, read by `head`."""
    return {
        "start": ParserState(
            Reads.HEAD, {"<|message|>": "content"}, head=head, bars="",
            begins=(" to=", "to=", "<|message|>"),
        ),
        "head": ParserState(Reads.HEAD, {"<|message|>": "content"}, head=head, bars=""),
        "reasoning": ParserState(Reads.REASONING, MUSE_ENDS),
        "content": ParserState(Reads.CONTENT, MUSE_ENDS),
        "after": ParserState(Reads.CONTENT, {"<|start|>": "head"}),
    }  # fmt: skip


def muse_states_with_calls() -> dict[str, ParserState]:
    """The states of messages, and of the calls that some of them are."""
    calls = marked_parameters(
        "<atem:function_calls>", "</atem:function_calls>", '<atem:invoke name="', '">',
        '<atem:parameter name="', '">', "</atem:invoke>", "</atem:parameter>",
    )  # fmt: skip
    called = {**calls["closed"].delimiters, **MUSE_ENDS}
    return {
        **calls,
        **muse_states(muse_head),
        "calls": ParserState(Reads.BLANK, {"<atem:function_calls>": "section"}),
        "close": ParserState(
            Reads.CONTENT, {"</atem:function_calls>": "content", **called}, closes=True
        ),
        "closed": ParserState(Reads.CONTENT, called, closes=True),
    }


def muse_output_of(place: str, lasts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The format of an output from `place` on: thoughts as the model likes, then one of `lasts`."""
    return after_thoughts(
        place, lasts, begin=MUSE_THOUGHT, end="<|eom|>", next_message="<|start|>assistant"
    )


def muse_forced_calls(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The formats of a call of each of these tools, whose arguments come in the schema's order."""
    return [
        sequence(
            const(
                f" to={tool['name']}<|message|><atem:function_calls>\n"
                f'<atem:invoke name="{tool["name"]}">\n'
            ),
            *_muse_parameters(tool),
            const("</atem:invoke>\n</atem:function_calls>"),
        )
        for tool in tools
    ]


def _muse_parameters(tool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Each parameter of a tool as a format: text where a string may stand, else JSON."""
    root = tool["parameters"]
    schemas = ToolSchemas([tool])
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    formats: list[Mapping[str, Any]] = []
    for name, schema in (root.get("properties") or {}).items():
        begin, end = f'<atem:parameter name="{name}">', "</atem:parameter>\n"
        types = schemas.types(tool["name"], name)
        if types and "string" not in types:
            value = {"type": "json_schema", "json_schema": {**schema, **shared}}
            made = sequence(const(begin), value, const(end))
        elif choices := _texts_of(schema):
            made = one_of([const(f"{begin}{text}{end}") for text in choices])
        else:
            made = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
        is_required = name in schemas.required(tool["name"])
        formats.append(made if is_required else one_of([made, const("")]))
    return formats


def _texts_of(schema: Any) -> list[str]:
    """The strings of an enum that has nothing else; [] for another schema."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    values = values if isinstance(values, list) else []
    return values if all(isinstance(value, str) for value in values) else []


INKLING_MODEL = "<|message_model|>"
INKLING_CALL = "<|content_invoke_tool_json|>"
INKLING_ENDS = {
    **dict.fromkeys(("<|end_message|>", "<|content_model_end_sampling|>"), "content"),
    **dict.fromkeys((INKLING_MODEL, "<|content_text|>"), "content"),
    "<|content_thinking|>": "reasoning",
}


def inkling_states(ends: Mapping[str, str]) -> dict[str, ParserState]:
    """Messages of Inkling, each after one of the tokens `ends`, which say what it is."""
    return {
        "start": ParserState(Reads.CONTENT, ends),
        "content": ParserState(Reads.CONTENT, ends),
        "reasoning": ParserState(Reads.REASONING, ends),
    }


def inkling_output_of(place: str, lasts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The format of an output from `place` on: thoughts as the model likes, then one of `lasts`.
    The prompt may end with the role of the first message or leave it to the output.
    """
    output = after_thoughts(
        place, lasts, begin="<|content_thinking|>", end="<|end_message|>",
        next_message=INKLING_MODEL,
    )  # fmt: skip
    if place == "reasoning":
        return output
    return sequence(one_of([const(""), const(INKLING_MODEL)]), output)


def inkling_forced_calls(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The formats of a call of each of these tools with arguments that follow its schema."""
    return [
        sequence(
            const(f'{INKLING_CALL}{{"name":{json.dumps(tool["name"])},"args":'),
            {"type": "json_schema", "json_schema": tool["parameters"]},
            const("}"),
        )
        for tool in tools
    ]


MUSE_GLIMMER = ToolFormat(
    "muse_glimmer",
    muse_states_with_calls(),
    start="start",
    has_reasoning=True,
    forced_calls=muse_forced_calls,
)
INKLING = ToolFormat(
    "inkling",
    {
        **inkling_states({**INKLING_ENDS, INKLING_CALL: "call"}),
        "call": ParserState(Reads.ENVELOPE, INKLING_ENDS, then="content"),
    },
    start="start",
    argument_keys=("args", "arguments", "parameters"),
    has_reasoning=True,
    forced_calls=inkling_forced_calls,
)
MUSE_GLIMMER_REASONING = ReasoningFormat(
    "muse_glimmer",
    (MUSE_THOUGHT,),
    ("<|eom|>",),
    answer_starts=(" to=user<|message|>",),
    output_of=muse_output_of,
    table=ToolFormat(
        "muse_glimmer", muse_states(muse_reader_head), start="start", has_reasoning=True
    ),
)
INKLING_REASONING = ReasoningFormat(
    "inkling",
    ("<|content_thinking|>",),
    ("<|end_message|>",),
    answer_starts=("<|content_text|>",),
    begins_call=INKLING_CALL,
    output_of=inkling_output_of,
    table=ToolFormat("inkling", inkling_states(INKLING_ENDS), start="start", has_reasoning=True),
)
MESSAGE_FORMATS = (MUSE_GLIMMER, INKLING)
MESSAGE_REASONINGS = (MUSE_GLIMMER_REASONING, INKLING_REASONING)
