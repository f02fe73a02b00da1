"""Deltas of an answer made into the blocks of a message and the events of its stream."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import msgspec

from quire.outputs import CompletionOutput, RequestOutput
from quire.server.anthropic.cut_json import readable_part
from quire.server.anthropic.replies import (
    Block,
    MessageReply,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from quire.server.http.event_stream import EventData
from quire.server.openai.parsed_answer import ParsedAnswer
from quire.server.output_parsing import ArgumentText, CallStarted, ContentText, ReasoningText

_CUT = ("length", "abort")
"""Finish reasons of an answer that was cut off."""


class MessageWriter:
    """Builds one message. Each change of `message` is an event, in order."""

    def __init__(self, message: MessageReply, answer: ParsedAnswer, *, shows_cached: bool) -> None:
        self._has_begun = False
        self.message = message
        self._answer = answer
        self._shows_cached = shows_cached
        self._prompt_len = message.usage.input_tokens
        self._open: Block | None = None
        self._arguments = ""

    def take(self, output: RequestOutput) -> Iterator[EventData]:
        """A delta's events; the first starts the message, and tells how much was cached."""
        [completion] = output.outputs
        self._count_cached(output)
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self.message}
        is_last = completion.finish_reason is not None
        for event in self._answer.events(completion.text, is_last=is_last):
            match event:
                case ReasoningText(text):
                    block = yield from self._block(ThinkingBlock)
                    block.thinking += text
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case ContentText(text):
                    block = yield from self._block(TextBlock)
                    block.text += text
                    yield self._delta({"type": "text_delta", "text": text})
                case CallStarted(_, id, name):
                    yield from self._begin(ToolUseBlock(id, name))
                case ArgumentText(_, text):
                    self._arguments += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
        self.message.usage.output_tokens += len(completion.token_ids)
        if output.kv_transfer_params is not None:
            self.message.kv_transfer_params = dict(output.kv_transfer_params)
        if is_last:
            yield from self._end(completion)

    def _block(self, kind: Any) -> Generator[EventData, None, Any]:
        """The open block of this kind, begun if need be."""
        if not isinstance(self._open, kind):
            yield from self._begin(kind())
        return self._open

    def _begin(self, block: Block) -> Iterator[EventData]:
        yield from self._close()
        self._open = block
        self.message.content.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self, *, is_cut: bool = False) -> Iterator[EventData]:
        block, self._open = self._open, None
        if block is None:
            return
        if isinstance(block, ToolUseBlock):
            self._close_call(block, is_cut)
        yield {"type": "content_block_stop", "index": self._index}

    def _close_call(self, block: ToolUseBlock, is_cut: bool) -> None:
        """A call's input must be an object: what the model wrote instead is shown as it stands. A
        call that is cut has the members that are complete, as clients read the same stream.
        """
        arguments, self._arguments = self._arguments, ""
        if is_cut and (readable := readable_part(arguments)) is not None:
            block.input = readable
            return
        try:
            block.input = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            self.message.content[-1] = TextBlock(text=arguments)

    def _end(self, completion: CompletionOutput) -> Iterator[EventData]:
        yield from self._close(is_cut=completion.finish_reason in _CUT)
        message = self.message
        message.stop_reason = _stop_reason(completion, message)
        if message.stop_reason == "stop_sequence":
            message.stop_sequence = str(completion.stop_reason)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": message.usage}
        yield {"type": "message_stop"}

    def _count_cached(self, output: RequestOutput) -> None:
        usage = self.message.usage
        if self._shows_cached and output.num_cached_tokens:
            usage.cache_read_input_tokens = output.num_cached_tokens
            # Anthropic's input_tokens are those after the last cached one, OpenAI's are all
            usage.input_tokens = self._prompt_len - output.num_cached_tokens

    def _delta(self, delta: dict[str, str]) -> EventData:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1


def _stop_reason(completion: CompletionOutput, message: MessageReply) -> str:
    if completion.finish_reason in _CUT:  # this API has one word for them
        return "max_tokens"
    if any(isinstance(block, ToolUseBlock) for block in message.content):
        return "tool_use"
    is_sequence = completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
    return "stop_sequence" if is_sequence else "end_turn"
