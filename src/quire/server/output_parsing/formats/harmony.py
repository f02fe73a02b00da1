"""The format of gpt-oss: messages with a header that says to whom they go and on which channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

(on one line). The prompt ends with `<|start|>assistant`. Source: OpenAI's page on the harmony
response format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.output_parsing.state_table import (
    Head,
    ParserState,
    Reads,
    ReasoningFormat,
    ToolFormat,
)

CHANNEL = "<|channel|>"
RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."
ANALYSIS = "analysis"
JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[ \n]"}}
"""One blank at most between two tokens of JSON: a model must not fill its budget with blanks."""
ENDS = {"<|end|>": "between", "<|return|>": "between", "<|call|>": "between", "<|start|>": "head"}


def whole_head(text: str) -> Head | None:
    """Where a message goes: to a function, or to the client, as its channel says."""
    recipient = RECIPIENT.search(text)
    if recipient and recipient[1].startswith(FUNCTIONS) and recipient[1] != FUNCTIONS:
        return Head(recipient[1].removeprefix(FUNCTIONS))
    return reader_head(text)


def reader_head(text: str) -> Head | None:
    """Where a message goes without functions: analysis is reasoning, the rest is content."""
    channel = CHANNEL_NAME.search(text)
    is_reasoning = channel is not None and channel[1] == ANALYSIS
    return Head(then="reasoning" if is_reasoning else "content")


def _states(with_calls: bool) -> dict[str, ParserState]:
    head = whole_head if with_calls else reader_head
    return {
        "start": ParserState(
            Reads.HEAD, {"<|message|>": "arguments"}, head=head, bars="",
            begins=(CHANNEL, " to=", "<|constrain|>", "<|message|>"),
        ),
        "head": ParserState(Reads.HEAD, {"<|message|>": "arguments"}, head=head, bars=""),
        "channel": ParserState(
            Reads.HEAD, {"<|message|>": "arguments"}, head=lambda text: head(CHANNEL + text),
            bars="",
        ),
        "reasoning": ParserState(Reads.REASONING, ENDS),
        "content": ParserState(Reads.CONTENT, ENDS),
        "arguments": ParserState(Reads.TEXT, ENDS),
        "between": ParserState(Reads.CONTENT, {"<|start|>": "head", CHANNEL: "channel"}),
    }  # fmt: skip


def one_call(tools: Sequence[Mapping[str, Any]]) -> str:
    """The grammar, in Lark's notation, of an output that is analysis as the model likes and then
    one call of these tools with arguments that follow their schemas.
    """
    calls = [f"call_{index}: {_one_call(tool)}" for index, tool in enumerate(tools)]
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    return "\n".join(
        [
            "start: thought* call",
            'thought: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"',
            f'call: <|channel|> "commentary" ({names})',
            *calls,
            r"TEXT: /(.|\n)*/",
        ]
    )


def _one_call(tool: Mapping[str, Any]) -> str:
    recipient = json.dumps(f" to={FUNCTIONS}{tool['name']} ")
    schema = json.dumps({**JSON_OPTIONS, **tool["parameters"]})
    return f'{recipient} <|constrain|> "json" <|message|> %json {schema}'


HARMONY = ToolFormat(
    "openai", _states(True), start="start", has_reasoning=True, forced_grammar=one_call
)
HARMONY_REASONING = ReasoningFormat(
    "openai_gptoss",
    starts=("<|channel|>analysis<|message|>",),
    ends=("<|end|>",),
    answer_starts=("<|channel|>final<|message|>",),
    table=ToolFormat(
        "openai_gptoss", _states(False), start="start",
        has_reasoning=True,
    ),
)  # fmt: skip
