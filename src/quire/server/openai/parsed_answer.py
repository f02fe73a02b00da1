"""The events of a parsed answer as the messages and deltas of chat."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from quire.server.openai.replies import (
    ChatDelta,
    ChatMessage,
    CustomCall,
    CustomDelta,
    FunctionCall,
    FunctionDelta,
    MessageToolCall,
    ToolCallDelta,
)
from quire.server.output_parsing import (
    ArgumentText,
    CallStarted,
    ContentText,
    CustomInputs,
    Event,
    OutputParser,
    ReasoningText,
    ToolCall,
    ToolUse,
    whole,
)


class ParsedAnswer:
    """One of n answers as its parser reads it: deltas for a stream, a message for a whole reply.

    `tools`: how the request uses tools. `holds_back`: a piece of text may add nothing yet.
    `is_legacy`: the call is a `function_call`,
    as requests with `functions` expect.
    """

    holds_back = True

    def __init__(
        self,
        role: str,
        parser: OutputParser,
        tools: ToolUse,
        *,
        shows_reasoning: bool,
        is_legacy: bool = False,
    ) -> None:
        self.role = role
        self.reasoning = ""
        self._parser = parser
        self.tools = tools
        self._inputs = CustomInputs(() if tools.writes_input else tools.custom)
        self._custom_indices: set[int] = set()
        self._shows_reasoning = shows_reasoning
        self._is_legacy = is_legacy

    def delta(self, text: str, *, is_last: bool) -> ChatDelta:
        """Return what the next piece of text adds: nothing while the parser holds it back."""
        return self._delta(self.events(text, is_last=is_last))

    def message(self, text: str) -> ChatMessage:
        read = whole(self.events(text, is_last=True))
        calls = [self._call(call) for call in read.tool_calls]
        is_shown = self._shows_reasoning and not self._parser.is_filled
        reasoning = read.reasoning if is_shown else None
        message = ChatMessage(
            role=self.role,
            # an answer of nothing is an empty text; null means that something else is the answer
            content=read.content if read.content or reasoning or calls else "",
            reasoning=reasoning,
            reasoning_content=reasoning or UNSET,
        )
        if calls and self._is_legacy:
            call = read.tool_calls[0]
            message.function_call = FunctionCall(call.name, call.arguments)
        elif calls:
            message.tool_calls = calls
        return message

    def _call(self, call: ToolCall) -> MessageToolCall:
        if call.name in self.tools.custom:
            custom = CustomCall(call.name, call.arguments)
            return MessageToolCall(call.id, type="custom", custom=custom)
        return MessageToolCall(call.id, FunctionCall(call.name, call.arguments))

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the engine's reason, or "tool_calls" if the answer ended with calls by choice."""
        # OpenAI's reason stays "stop" where one call was chosen by its name
        ends_with_calls = reason == "stop" and self.has_calls and not self.tools.is_named
        if not ends_with_calls:
            return reason
        return "function_call" if self._is_legacy else "tool_calls"

    @property
    def has_calls(self) -> bool:
        return self._parser.num_calls > 0

    @property
    def is_call(self) -> bool:
        """Whether no more content is expected: a call was forced or has begun."""
        return self.tools.is_forced or self.has_calls

    def events(self, text: str, *, is_last: bool) -> list[Event]:
        events = self._parser.feed(text)
        if is_last:
            events = [*events, *self._parser.finish()]
        for event in events:
            if isinstance(event, ReasoningText):
                self.reasoning += event.text
        return self._inputs.decoded(events, is_last=is_last) if self.tools.custom else events

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
                    calls[index] = self._started(index, id, name)
                case ArgumentText(index, text) if index in self._custom_indices:
                    _add_input(calls, index, text)
                case ArgumentText(index, text):
                    _add_arguments(calls, index, text)
        if reasoning and self._shows_reasoning:
            # two names: servers of this field have sent both, and clients read either
            delta.reasoning = delta.reasoning_content = reasoning
        if content:
            delta.content = content
        elif calls:
            delta.content = None
        if calls and self._is_legacy:
            delta.function_call = calls[0].function
        elif calls:
            delta.tool_calls = list(calls.values())
        return delta

    def _started(self, index: int, id: str, name: str) -> ToolCallDelta:
        if name in self.tools.custom:
            self._custom_indices.add(index)
            return ToolCallDelta(index, id, "custom", custom=CustomDelta(name, ""))
        return ToolCallDelta(index, id, "function", FunctionDelta(name, ""))


def _add_input(calls: dict[int, ToolCallDelta], index: int, text: str) -> None:
    call = calls.setdefault(index, ToolCallDelta(index, custom=CustomDelta()))
    assert call.custom is not UNSET
    before = call.custom.input
    call.custom.input = text if before is UNSET else before + text


def _add_arguments(calls: dict[int, ToolCallDelta], index: int, text: str) -> None:
    call = calls.setdefault(index, ToolCallDelta(index, function=FunctionDelta()))
    assert call.function is not UNSET
    before = call.function.arguments
    call.function.arguments = text if before is UNSET else before + text
