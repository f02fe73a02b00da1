"""What the model wrote, taken apart: the one place where chat replies meet the reader of
transcripts.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from quire.errors import InvalidParameter, NotBuiltYet
from quire.server.context import Server
from quire.server.openai.replies import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from quire.server.openai.requests import ChatRequest
from quire.server.transcript import (
    ArgumentText,
    CallStarted,
    ContentText,
    Event,
    ReasoningText,
    TranscriptReader,
    whole,
)


def check_tools(server: Server, body: ChatRequest) -> None:
    """Raise InvalidParameter where the request's tools cannot be honoured by this server."""
    if not body.tools or body.tool_choice == "none":
        return
    if body.tool_choice not in (None, "auto"):
        hint = "Use 'auto' or 'none'."
        raise NotBuiltYet("tool_choice", body.tool_choice, hint)
    if not server.chat.reads_tools:
        allowed = "this server was started without --tool-call-parser"
        hint = "Start it with the parser of the model's family, or send tool_choice='none'."
        raise InvalidParameter("tool_choice", body.tool_choice or "auto", allowed, hint)


def needs_special_tokens(server: Server) -> bool:
    """Whether the marks that outputs are taken apart by are special tokens, which must be seen."""
    tokenizer = server.tokenizer
    if tokenizer is None:
        return False
    return server.chat.transcripts.needs_special_tokens(tokenizer.all_special_tokens)


class Answer:
    """One of n answers while it arrives: deltas for a stream, a message for a whole reply."""

    def __init__(self, role: str, reader: TranscriptReader, *, shows_reasoning: bool) -> None:
        self.role = role
        self.reasoning = ""
        self.has_calls = False
        self._reader = reader
        self._shows_reasoning = shows_reasoning

    def delta(self, text: str, *, is_last: bool) -> ChatDelta:
        """What the next piece of text adds; nothing, while it may become something else."""
        return self._delta(self.events(text, is_last=is_last))

    def message(self, text: str) -> ChatMessage:
        """The whole text as a message."""
        read = whole(self.events(text, is_last=True))
        calls = [ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in
                 read.tool_calls]  # fmt: skip
        reasoning = read.reasoning if self._shows_reasoning else None
        return ChatMessage(
            role=self.role,
            content=read.content if read.content or reasoning or calls else "",
            tool_calls=calls or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning or UNSET,
        )

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason, but for an answer that ends with its calls."""
        return "tool_calls" if reason == "stop" and self.has_calls else reason

    def events(self, text: str, *, is_last: bool) -> list[Event]:
        """What the next piece of text says."""
        events = self._reader.feed(text)
        if is_last:
            events = [*events, *self._reader.finish()]
        for event in events:
            if isinstance(event, CallStarted):
                self.has_calls = True
            elif isinstance(event, ReasoningText):
                self.reasoning += event.text
        return events

    def _delta(self, events: Iterable[Event]) -> ChatDelta:
        delta, content, reasoning = ChatDelta(), "", ""
        calls: dict[int, ToolCallDelta] = {}
        for event in events:
            match event:
                case ContentText(text):
                    content += text
                case ReasoningText(text):
                    reasoning += text
                case CallStarted(index, id, name):
                    calls[index] = ToolCallDelta(index, id, "function", FunctionDelta(name, ""))
                case ArgumentText(index, text):
                    _add_arguments(calls, index, text)
        if reasoning and self._shows_reasoning:
            delta.reasoning = delta.reasoning_content = reasoning
        if content:
            delta.content = content
        elif calls:
            delta.content = None
        if calls:
            delta.tool_calls = list(calls.values())
        return delta


def is_empty(delta: ChatDelta) -> bool:
    """Whether a delta says nothing."""
    return delta.content is UNSET and delta.reasoning is UNSET and delta.tool_calls is UNSET


def _add_arguments(calls: dict[int, ToolCallDelta], index: int, text: str) -> None:
    call = calls.setdefault(index, ToolCallDelta(index, function=FunctionDelta()))
    assert call.function is not UNSET
    before = call.function.arguments
    call.function.arguments = text if before is UNSET else before + text


def open_answers(server: Server, body: ChatRequest, prompt: str, role: str) -> list[Answer]:
    """A reader for each answer to `prompt`, the text that the model goes on with."""
    plan = server.chat.transcripts
    last = body.messages[-1].get("content") if body.continue_final_message else None
    place = plan.place(prompt, last if isinstance(last, str) else "")
    reads_calls = bool(body.tools) and body.tool_choice != "none" and server.chat.reads_tools
    parallel = body.parallel_tool_calls is not False
    return [
        Answer(
            role,
            plan.open(place, tools=body.tools if reads_calls else None, parallel=parallel),
            shows_reasoning=body.include_reasoning is not False,
        )
        for _ in range(body.n or 1)
    ]
