"""The format of gpt-oss: messages with a header that says to whom they go and on which channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

(on one line). The prompt ends with `<|start|>assistant`. Source: OpenAI's page on the harmony
response format.
"""

from __future__ import annotations

import re

from quire.server.transcript.table import Head, Reads, ReasoningFormat, State, ToolFormat

CHANNEL = "<|channel|>"
RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."
ANALYSIS = "analysis"
ENDS = {"<|end|>": "between", "<|return|>": "between", "<|call|>": "between", "<|start|>": "head"}


def whole_head(text: str) -> Head | None:
    """Where a message goes: to a function, or to the reader of the channel."""
    recipient = RECIPIENT.search(text)
    if recipient and recipient[1].startswith(FUNCTIONS) and recipient[1] != FUNCTIONS:
        return Head(recipient[1].removeprefix(FUNCTIONS))
    return reader_head(text)


def reader_head(text: str) -> Head | None:
    """Where a message goes if there are no functions: analysis is reasoning, the rest is not."""
    channel = CHANNEL_NAME.search(text)
    is_reasoning = channel is not None and channel[1] == ANALYSIS
    return Head(then="reasoning" if is_reasoning else "content")


def _states(with_calls: bool) -> dict[str, State]:
    head = whole_head if with_calls else reader_head
    return {
        "start": State(
            Reads.HEAD, {"<|message|>": "arguments"}, head=head, bars="",
            begins=(CHANNEL, " to=", "<|constrain|>", "<|message|>"),
        ),
        "head": State(Reads.HEAD, {"<|message|>": "arguments"}, head=head, bars=""),
        "channel": State(
            Reads.HEAD, {"<|message|>": "arguments"}, head=lambda text: head(CHANNEL + text),
            bars="",
        ),
        "reasoning": State(Reads.REASONING, ENDS),
        "content": State(Reads.CONTENT, ENDS),
        "arguments": State(Reads.TEXT, ENDS),
        "between": State(Reads.CONTENT, {"<|start|>": "head", CHANNEL: "channel"}),
    }  # fmt: skip


HARMONY = ToolFormat("openai", _states(True), start="start", has_reasoning=True)
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
