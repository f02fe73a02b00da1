"""Deltas of an answer made into the items of a response and the events of its stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from quire.outputs import CompletionOutput, RequestOutput
from quire.server.http.event_stream import EventData
from quire.server.openai.logprobs import chat_logprobs
from quire.server.openai.parsed_answer import ParsedAnswer
from quire.server.openai.replies import TokenLogprobs
from quire.server.openai.requests import ChatRequest
from quire.server.output_parsing import ArgumentText, CallStarted, ContentText, Event, ReasoningText
from quire.server.responses.items import in_namespace
from quire.server.responses.replies import (
    CallItem,
    CustomCallItem,
    InputDetails,
    Item,
    MessageItem,
    OutputDetails,
    OutputTextPart,
    RawMessageTokens,
    ReasoningItem,
    ReasoningTextPart,
    ResponseObject,
    ResponseUsage,
)
from quire.text.tokenizer import Tokenizer


class ResponseWriter:
    """Builds one response. Each change of `response` is an event, in order.

    Events are made before the next change and encoded at once: they hold the items themselves.
    """

    def __init__(
        self,
        response: ResponseObject,
        chat: ChatRequest,
        answer: ParsedAnswer,
        tokenizer: Tokenizer,
    ) -> None:
        self.response = response
        self._chat = chat
        self._answer = answer
        self._tokenizer = tokenizer
        self._number = 0
        self._open: Item | None = None

    def begin(self) -> Iterator[EventData]:
        self.response.status = "in_progress"
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def take(self, output: RequestOutput) -> Iterator[EventData]:
        """The events of a delta."""
        [completion] = output.outputs
        is_last = completion.finish_reason is not None
        logprobs = self._logprobs(completion)
        for event in self._answer.events(completion.text, is_last=is_last):
            yield from self._say(event, logprobs)
        self._count(output, completion)
        self._add_tokens(completion)
        if output.kv_transfer_params is not None:
            self.response.kv_transfer_params = dict(output.kv_transfer_params)
        if is_last:
            yield from self._end(completion.finish_reason or "stop")

    def fail(self, error: Any) -> Iterator[EventData]:
        """The generation went wrong; `error` has a code and a message."""
        self.response.error = error
        self.response.status = "failed"
        yield from self._close()
        yield self._event("response.failed", response=self.response)

    def _say(self, event: Event, logprobs: list[TokenLogprobs]) -> Iterator[EventData]:
        match event:
            case ReasoningText(text):
                yield from self._text(ReasoningItem, text, [])
            case ContentText(text):
                yield from self._text(MessageItem, text, logprobs)
            case CallStarted(_, call_id, name) if name in self._answer.tools.custom:
                yield from self._begin(CustomCallItem(_id("ctc"), call_id, name))
            case CallStarted(_, call_id, name):
                yield from self._begin(self._call(call_id, name))
            case ArgumentText(_, text):
                yield self._argument(text)

    def _call(self, call_id: str, name: str) -> CallItem:
        """A call by the name that the model knows: its own, or one in a namespace."""
        item = CallItem(_id("fc"), call_id, name)
        for tool in self.response.tools:
            if tool.get("type") == "namespace":
                prefix = in_namespace(tool["name"], "")
                if name.startswith(prefix):
                    item.name, item.namespace = name.removeprefix(prefix), tool["name"]
        return item

    def _argument(self, text: str) -> EventData:
        """Add to the arguments or the input of the open call."""
        item = self._open
        if isinstance(item, CustomCallItem):
            item.input += text
            return self._of_item("response.custom_tool_call_input.delta", item, delta=text)
        assert isinstance(item, CallItem)
        item.arguments += text
        return self._of_item("response.function_call_arguments.delta", item, delta=text)

    def _text(
        self,
        kind: type[ReasoningItem] | type[MessageItem],
        text: str,
        logprobs: list[TokenLogprobs],
    ) -> Iterator[EventData]:
        if not isinstance(self._open, kind):
            if kind is ReasoningItem:
                yield from self._begin(ReasoningItem(_id("rs"), [ReasoningTextPart()]))
            else:
                yield from self._begin(MessageItem(_id("msg"), [OutputTextPart()]))
        item = self._open
        if isinstance(item, ReasoningItem):
            item.content[0].text += text
            yield self._of_part("response.reasoning_text.delta", item, delta=text)
        elif isinstance(item, MessageItem):
            item.content[0].text += text
            item.content[0].logprobs += logprobs
            name = "response.output_text.delta"
            yield self._of_part(name, item, delta=text, logprobs=logprobs)

    def _begin(self, item: Item) -> Iterator[EventData]:
        yield from self._close()
        self._open = item
        self.response.output.append(item)
        yield self._of_output("response.output_item.added", item)
        if not isinstance(item, CallItem | CustomCallItem):
            yield self._of_part("response.content_part.added", item, part=item.content[0])

    def _close(self, status: Any = "completed") -> Iterator[EventData]:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        if isinstance(item, CallItem):
            call = {"name": item.name, "arguments": item.arguments}
            yield {**self._of_item("response.function_call_arguments.done", item), **call}
        elif isinstance(item, CustomCallItem):
            yield self._of_item("response.custom_tool_call_input.done", item, input=item.input)
        else:
            part = item.content[0]
            if isinstance(part, OutputTextPart):
                name, more = "response.output_text.done", {"logprobs": part.logprobs}
            else:
                name, more = "response.reasoning_text.done", {}
            yield self._of_part(name, item, text=part.text, **more)
            yield self._of_part("response.content_part.done", item, part=part)
        yield self._of_output("response.output_item.done", item)

    def _end(self, reason: str) -> Iterator[EventData]:
        response = self.response
        is_whole = reason not in ("length", "abort")
        yield from self._close("completed" if is_whole else "incomplete")
        response.status = "completed" if is_whole else "incomplete"
        response.completed_at = int(time.time())
        if reason == "length":
            response.incomplete_details = {"reason": "max_output_tokens"}
        elif reason == "abort":
            response.status = "cancelled"
        name = "response.completed" if is_whole else "response.incomplete"
        yield self._event(name, response=response)

    def _count(self, output: RequestOutput, completion: CompletionOutput) -> None:
        usage = self.response.usage
        assert usage is not None
        usage.input_tokens_details.cached_tokens = (
            output.num_cached_tokens or usage.input_tokens_details.cached_tokens
        )
        usage.output_tokens += len(completion.token_ids)
        usage.total_tokens = usage.input_tokens + usage.output_tokens
        # counted once at the end: pieces of a text have more tokens than the text
        if completion.finish_reason is not None and self._answer.reasoning:
            ids = self._tokenizer.encode(self._answer.reasoning, add_special_tokens=False)
            usage.output_tokens_details.reasoning_tokens = len(ids)

    def _add_tokens(self, completion: CompletionOutput) -> None:
        """Add to the message of all output, where it is asked for. Its text is decoded once and
        whole: a character may have several tokens.
        """
        messages = self.response.output_messages
        if not isinstance(messages, list):
            return
        if not messages:
            messages.append(RawMessageTokens("", []))
        messages[0].tokens += completion.token_ids
        if completion.finish_reason is not None:
            messages[0].message = self._tokenizer.decode(messages[0].tokens)

    def _logprobs(self, completion: CompletionOutput) -> list[TokenLogprobs]:
        if not self._chat.logprobs or completion.logprobs is None:
            return []
        num_top = self._chat.top_logprobs or 0
        found = chat_logprobs(completion.logprobs, completion.token_ids, num_top, self._tokenizer)
        return found.content or []

    def _of_output(self, name: str, item: Item) -> EventData:
        return self._event(name, output_index=self._index, item=item)

    def _of_item(self, name: str, item: Item, **more: Any) -> EventData:
        return self._event(name, item_id=item.id, output_index=self._index, **more)

    def _of_part(self, name: str, item: Item, **more: Any) -> EventData:
        return self._of_item(name, item, content_index=0, **more)

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _event(self, type: str, **fields: Any) -> EventData:
        number, self._number = self._number, self._number + 1
        return {"type": type, "sequence_number": number, **fields}


def empty_usage(prompt_len: int) -> ResponseUsage:
    """Usage before the first token."""
    return ResponseUsage(prompt_len, 0, prompt_len, InputDetails(), OutputDetails())


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
