"""`/v1/responses`: create, stream, ask again, cancel, delete."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.encodable import to_json
from quire.engine.frontend.output_stream import Outputs, close_all, last_outputs, raise_error
from quire.errors import CapacityError, InvalidParameter
from quire.server.context import RequestName, Server
from quire.server.http.event_stream import EventData, event
from quire.server.http.failures import Refusal, as_refusal
from quire.server.http.in_flight import while_connected
from quire.server.http.json_body import json_response
from quire.server.http.security import owner_of
from quire.server.openai.chat import chat_prompt, render_conversation
from quire.server.openai.parsed_chat import ChatPrompt, open_answers
from quire.server.openai.requests import ChatRequest
from quire.server.responses import compaction
from quire.server.responses.conversations import kept as kept_conversation
from quire.server.responses.input_items import named_items, page_of
from quire.server.responses.items import conversation
from quire.server.responses.replies import (
    CallItem,
    CompactedResponse,
    CustomCallItem,
    InputTokens,
    RawMessageTokens,
    ResponseObject,
)
from quire.server.responses.requests import ResponsesRequest
from quire.server.responses.stored_conversation import Conversation
from quire.server.responses.stored_response import StoredResponse
from quire.server.responses.writer import ResponseWriter, empty_usage

logger = logging.getLogger(__name__)


class Deleted(msgspec.Struct):
    """The reply to the deletion of a response."""

    id: str
    object: str = "response"
    deleted: bool = True


async def create(server: Server, request: Request) -> Response:
    """Make a response to an input."""
    body, talk, before = await _asked(server, request)
    name = RequestName.random("resp_")
    if talk is not None:
        # before the model works; the output is not known yet, so it may go past the bound
        talk.check_room(named_items(body.input, name.shown))
    chat = body.as_chat(before)
    chat.stream = True  # so that the engine gives deltas
    prompt = await chat_prompt(server, request, chat)
    writer = _writer(server, body, chat, prompt, name)
    stored = StoredResponse(
        writer.response,
        [*before, *conversation(body.input)],
        owner_of(request),
        named_items(body.input, writer.response.id),
    )
    # before the engine has the request, so that one without room costs nothing
    if writer.response.store and not server.responses.add(stored):
        text = "There is no room for this response (--max-stored-responses, --max-stored-bytes)."
        raise CapacityError(text, retry_after_s=1.0)
    try:
        streams = await server.start(request, chat, name, [prompt])
    except BaseException:
        server.responses.remove(name.shown)
        raise
    return await _deliver(server, request, body, _Run(server, writer, stored, streams, talk))


async def _deliver(server: Server, request: Request, body: ResponsesRequest, run: _Run) -> Response:
    if body.background:
        # kept, since the loop holds only weak references to its tasks
        run.stored.task = asyncio.create_task(run.to_end())
        if body.stream:
            return server.stream(run.stored.follow(0), [])
        return json_response(run.stored.response)
    if body.stream:
        return server.stream(run.events(), run.streams)
    try:
        await while_connected(request, run.to_end())
    finally:
        await close_all(run.streams)
    if run.error is not None:
        raise run.error
    return json_response(run.stored.response)


async def retrieve(server: Server, request: Request) -> Response:
    """A response that was kept, whole or as the stream that it was."""
    stored = _kept(server, request, request.path_params["id"])
    if request.query_params.get("stream") not in ("true", "1"):
        return json_response(stored.response)
    if stored.is_cut:
        raise Refusal(400, "This response was too long for its events to be kept.", param="stream")
    after = request.query_params.get("starting_after", "-1")
    if not re.fullmatch("-?[0-9]{1,8}", after):
        raise InvalidParameter("starting_after", after, "it must be the number of an event")
    return server.stream(stored.follow(max(0, int(after) + 1)), [])


async def input_tokens(server: Server, request: Request) -> Response:
    """Counts the tokens of an input's prompt."""
    body, _, before = await _asked(server, request)
    chat = body.as_chat(before)
    chat.check()
    rendered = await render_conversation(server, request, chat, limit=None)
    return json_response(InputTokens(len(rendered.ids)))


async def compact(server: Server, request: Request) -> Response:
    """Make a conversation short: see compaction.py."""
    body, _, before = await _asked(server, request)
    chat = body.as_chat(before)
    chat.messages.append({"role": "user", "content": compaction.REQUEST})
    chat.tools = chat.tool_choice = chat.response_format = None
    chat.max_completion_tokens = body.max_output_tokens or compaction.MAX_SUMMARY_TOKENS
    prompt = await chat_prompt(server, request, chat)
    name = RequestName.random("resp_")
    [answer] = open_answers(server, chat, prompt, "assistant")
    streams = await server.start(request, chat, name, [prompt])
    [output] = await while_connected(request, last_outputs(streams))
    [completion] = output.outputs
    summary = answer.message(completion.text).content or ""
    own = named_items(body.input, name.shown)
    users = [item for item in own if item.get("role") == "user"]
    item = {"type": "compaction", "id": f"cmp_{name.shown.removeprefix('resp_')}",
            "encrypted_content": compaction.sealed(summary)}  # fmt: skip
    usage = empty_usage(len(prompt.ids))
    usage.output_tokens = len(completion.token_ids)
    usage.total_tokens += usage.output_tokens
    made = CompactedResponse(
        id=name.shown, created_at=name.created, output=[*users, item], usage=usage
    )
    return json_response(made)


async def input_items(server: Server, request: Request) -> Response:
    """Lists the input of a kept response, page by page."""
    stored = _kept(server, request, request.path_params["id"])
    page = page_of(stored.input_items, request.query_params)
    return json_response(page)


async def cancel(server: Server, request: Request) -> Response:
    """End a response that is made in the background."""
    stored = _kept(server, request, request.path_params["id"])
    if stored.task is None:
        text = "Cannot cancel a synchronous response. Only one with background=true can be."
        raise Refusal(400, text)
    await server.engine.abort(server.in_flight.keys([stored.response.id]))
    # a client that leaves while it waits must not cancel the task that ends the response
    await asyncio.shield(stored.task)
    return json_response(stored.response)


async def delete(server: Server, request: Request) -> Response:
    """Forget a response; one that is being made is ended first."""
    stored = _kept(server, request, request.path_params["id"])
    if stored.task is not None and not stored.is_over:
        await server.engine.abort(server.in_flight.keys([stored.response.id]))
    server.responses.remove(stored.response.id)
    return json_response(Deleted(stored.response.id))


class _Run:
    """One response on its way: outputs of the engine in, events out."""

    def __init__(
        self,
        server: Server,
        writer: ResponseWriter,
        stored: StoredResponse,
        streams: Sequence[Outputs],
        talk: Conversation | None = None,
    ) -> None:
        self.stored = stored
        self._talk = talk
        self.streams = streams
        self.error: Exception | None = None
        self._server = server
        self._writer = writer

    async def to_end(self) -> None:
        """Make the response without sending its events."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                continue

    async def events(self) -> AsyncGenerator[bytes]:
        """Make the response; its events. A failure is one of them."""
        [stream] = self.streams
        try:
            for data in self._writer.begin():
                yield self._encode(data)
            async for output in stream:
                raise_error(output)
                for data in self._writer.take(output):
                    yield self._encode(data)
            said = _output_items(self.stored.response)
            # what a later response goes on from
            self.stored.messages += conversation(said)
            if self._talk is not None:
                self._add_to(self._talk, [*self.stored.input_items, *said])
        except Exception as error:
            self.error = error
            info = as_refusal(error).info
            for data in self._writer.fail({"code": "server_error", "message": info.message}):
                yield self._encode(data)
        finally:
            await stream.aclose()
            if self.stored.response.status in ("queued", "in_progress"):  # nobody waits for it
                self.stored.response.status = "cancelled"
            self.stored.end()

    def _add_to(self, talk: Conversation, items: list[dict[str, Any]]) -> None:
        if talk.extend(items):
            self._server.conversations.renew(talk.id)
        else:
            logger.warning("Response %s is not in its conversation, which is full.", self.stored.id)

    def _encode(self, data: EventData) -> bytes:
        encoded = event(to_json(data), data["type"])
        if self.stored.response.store:
            self.stored.record(encoded)
        return encoded


def _writer(
    server: Server, body: ResponsesRequest, chat: ChatRequest, prompt: ChatPrompt, name: RequestName
) -> ResponseWriter:
    [answer] = open_answers(server, chat, prompt, "assistant")
    params = prompt.params
    response = ResponseObject(
        id=name.shown,
        created_at=name.created,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        conversation={"id": body.conversation_id} if body.conversation_id else None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=server.name_of(body.model),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_tool_calls=body.max_tool_calls,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning,
        store=server.responses.is_open and body.store is not False,
        temperature=params.temperature,
        text={"format": (body.text and body.text.format) or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=params.top_p,
        top_logprobs=body.top_logprobs or 0,
        usage=empty_usage(len(prompt.ids)),
        user=body.user,
        metadata=body.metadata or {},
    )
    if body.enable_response_messages:
        response.input_messages = [RawMessageTokens(prompt.text or "", prompt.ids)]
        response.output_messages = []
    return ResponseWriter(response, chat, answer, server.need_tokenizer())


async def _asked(
    server: Server, request: Request
) -> tuple[ResponsesRequest, Conversation | None, list[dict[str, Any]]]:
    """Body, conversation, and messages that the input follows. Raises Refusal for unknown ones."""
    body = await server.read_for_model(request, ResponsesRequest, has_one_prompt=True)
    body.check()
    if body.conversation_id is None:
        return body, None, _before(server, request, body)
    talk = kept_conversation(server, request, body.conversation_id)
    return body, talk, conversation(talk.items)


def _before(server: Server, request: Request, body: ResponsesRequest) -> list[dict[str, Any]]:
    if body.background and not server.responses.is_open:
        raise Refusal(400, "This server keeps no responses.", param="background")
    if body.previous_response_id is None:
        return []
    stored = _kept(server, request, body.previous_response_id)
    if not stored.is_over:
        raise Refusal(409, "The previous response is still being made.")
    return list(stored.messages)


def _output_items(response: ResponseObject) -> list[dict[str, Any]]:
    items = [
        item
        for item in response.output
        # an empty message would be a turn of the assistant in the next prompt
        if isinstance(item, CallItem | CustomCallItem) or item.content[0].text
    ]
    found: list[dict[str, Any]] = msgspec.to_builtins(items)
    return found


def _kept(server: Server, request: Request, id: str) -> StoredResponse:
    stored = server.responses.get(id, owner_of(request))
    if stored is None:
        raise Refusal(404, f"There is no response `{id[:100]}` here.", param="response_id")
    return stored
