"""The format of gpt-oss: messages with a header that says to whom they go and on which channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

(on one line). The prompt ends with `<|start|>assistant`. Source: OpenAI's page on the harmony
response format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.output_parsing.formats.whole_outputs import after_thoughts, const, sequence
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
_CALL = f"<|channel|>commentary to={FUNCTIONS}"
ENDS = {"<|end|>": "between", "<|return|>": "between", "<|call|>": "between", "<|start|>": "head"}


def whole_head(text: str) -> Head | None:
    """Destination of a message: a function, or the client, as its channel says."""
    recipient = RECIPIENT.search(text)
    if recipient and recipient[1].startswith(FUNCTIONS) and recipient[1] != FUNCTIONS:
        return Head(recipient[1].removeprefix(FUNCTIONS))
    return reader_head(text)


def reader_head(text: str) -> Head | None:
    """Destination of a message without functions: analysis is reasoning, the rest is content."""
    channel = CHANNEL_NAME.search(text)
    is_reasoning = channel is not None and channel[1] == ANALYSIS
    return Head(then="reasoning" if is_reasoning else "content")


def _states(with_calls: bool) -> dict[str, ParserState]:
    head = whole_head if with_calls else reader_head
    return {
        "start": ParserState(
            Reads.HEAD, {"<|message|>": "arguments"}, head=head, bars="",
            # an output without any of these has no header, and is content from its first character
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


def output_of(place: str, lasts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The format of an output from `place` on: analysis as the model likes, then one of `lasts`."""
    return after_thoughts(
        place, lasts, begin="<|channel|>analysis<|message|>", end="<|end|>",
        next_message="<|start|>assistant",
    )  # fmt: skip


def forced_calls(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The formats of a call of each of these tools with arguments that follow its schema."""
    return [
        sequence(
            const(f"{_CALL}{tool['name']} <|constrain|>json<|message|>"),
            {"type": "json_schema", "json_schema": tool["parameters"]},
        )
        for tool in tools
    ]


HARMONY = ToolFormat(
    "openai", _states(True), start="start", has_reasoning=True, forced_calls=forced_calls
)
HARMONY_REASONING = ReasoningFormat(
    "openai_gptoss",
    starts=("<|channel|>analysis<|message|>",),
    ends=("<|end|>",),
    answer_starts=("<|channel|>final<|message|>",),
    begins_call=_CALL,
    output_of=output_of,
    table=ToolFormat(
        "openai_gptoss", _states(False), start="start",
        has_reasoning=True,
    ),
)  # fmt: skip
