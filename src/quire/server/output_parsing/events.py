"""The events of an output while it is parsed, and the whole that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of the reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """The next piece of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call whose name is known; `index` counts the calls of one output from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentText:
    """The next piece of the arguments of call `index`, as JSON text; never empty."""

    index: int
    text: str


Event = ReasoningText | ContentText | CallStarted | ArgumentText


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a whole. `arguments` is the JSON text, cut short where the output was."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """An output as parsed. `reasoning` and `content` are None where there is no such text."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


def whole(events: Iterable[Event]) -> ParsedOutput:
    """The sum of a stream of events: the answer of a request that is not streamed."""
    reasoning: list[str] = []
    content: list[str] = []
    started: list[CallStarted] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningText(text):
                reasoning.append(text)
            case ContentText(text):
                content.append(text)
            case CallStarted():
                started.append(event)
                arguments.append([])
            case ArgumentText(index, text):
                arguments[index].append(text)
    calls = [
        ToolCall(call.id, call.name, "".join(pieces))
        for call, pieces in zip(started, arguments, strict=True)
    ]
    return ParsedOutput("".join(reasoning) or None, "".join(content) or None, tuple(calls))
