"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from quire.encodable import to_json
from quire.engine.frontend.output_stream import Outputs, close_all, raise_error
from quire.server.anthropic.failures import error_json
from quire.server.anthropic.replies import Count, MessageReply, MessageUsage
from quire.server.anthropic.requests import CountRequest, MessagesRequest
from quire.server.anthropic.writer import MessageWriter
from quire.server.context import RequestName, Server
from quire.server.http.event_stream import event
from quire.server.http.in_flight import while_connected
from quire.server.http.json_body import json_response
from quire.server.openai.chat import chat_prompt
from quire.server.openai.parsed_chat import open_answers


async def messages(server: Server, request: Request) -> Response:
    """Answer a conversation."""
    body = await server.read_for_model(request, MessagesRequest, has_one_prompt=True)
    chat = body.generation(has_reasoning=server.chat.parser_plan.reasoning is not None)
    prompt = await chat_prompt(server, request, chat)
    name = RequestName.random("msg_")
    [answer] = open_answers(server, chat, prompt, "assistant")
    message = MessageReply(
        id=name.shown, model=server.name_of(body.model), usage=MessageUsage(len(prompt.ids), 0)
    )
    writer = MessageWriter(message, answer, shows_cached=server.replies.prompt_details)
    streams = await server.start(request, chat, name, [prompt])
    if body.stream:
        return server.stream(_events(streams, writer), streams)
    try:
        await while_connected(request, _to_end(streams, writer))
    finally:
        await close_all(streams)
    return json_response(message)


async def count_tokens(server: Server, request: Request) -> Response:
    """Counts the tokens of a conversation's prompt."""
    body = await server.read_for_model(request, CountRequest)
    # the least that a request can ask for, so that a long prompt is counted as well
    prompt = await chat_prompt(server, request, body.as_chat(max_tokens=1))
    num_tokens = len(prompt.ids)
    return json_response(Count(num_tokens, {"original_input_tokens": num_tokens}))


async def _to_end(streams: Sequence[Outputs], writer: MessageWriter) -> None:
    [stream] = streams
    async for output in stream:
        raise_error(output)
        for _ in writer.take(output):
            continue


async def _events(streams: Sequence[Outputs], writer: MessageWriter) -> AsyncGenerator[bytes]:
    [stream] = streams
    try:
        async for output in stream:
            raise_error(output)
            for data in writer.take(output):
                yield event(to_json(data), data["type"])
    # the status is sent already, so the failure is an event
    except Exception as error:
        yield event(error_json(error), "error")
