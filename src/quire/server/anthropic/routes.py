"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.errors import PromptTooLong
from quire.server.anthropic.replies import Count, MessageReply, MessageUsage
from quire.server.anthropic.requests import CountRequest, MessagesRequest
from quire.server.anthropic.writer import MessageWriter
from quire.server.context import RequestName, Server
from quire.server.engine_outputs import Outputs, close_all, raise_error, while_connected
from quire.server.http.event_stream import event
from quire.server.http.failures import JSON, Refusal, as_refusal
from quire.server.openai.chat import chat_prompt
from quire.server.openai.parsed_chat import open_answers

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def messages(server: Server, request: Request) -> Response:
    """Answer a conversation."""
    try:
        return await _messages(server, request)
    except ClientDisconnect:
        raise
    except Exception as error:
        return error_response(error)


async def count_tokens(server: Server, request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    try:
        body = await server.read(request, CountRequest)
        server.check_model(body.model)
        chat = body.as_chat(max_tokens=1)
        prompt = await chat_prompt(server, chat)
    except ClientDisconnect:
        raise
    except Exception as error:
        return error_response(error)
    num_tokens = len(prompt.ids)
    count = Count(num_tokens, {"original_input_tokens": num_tokens})
    return Response(msgspec.json.encode(count), media_type=JSON)


async def _messages(server: Server, request: Request) -> Response:
    body = await server.read(request, MessagesRequest)
    server.check_model(body.model)
    chat = body.generation(has_reasoning=server.chat.parser_plan.reasoning is not None)
    prompt = await chat_prompt(server, chat)
    name = RequestName.random("msg_")
    [answer] = open_answers(server, chat, prompt, "assistant")
    message = MessageReply(
        id=name.shown, model=server.names[0], usage=MessageUsage(len(prompt.ids), 0)
    )
    writer = MessageWriter(message, answer, shows_cached=server.replies.prompt_details)
    streams = await server.start(request, chat, name, [prompt])
    if body.stream:
        return server.stream(_events(streams, writer), streams)
    try:
        await while_connected(request, _to_end(streams, writer))
    finally:
        await close_all(streams)
    return Response(msgspec.json.encode(message), media_type=JSON)


async def _to_end(streams: Sequence[Outputs], writer: MessageWriter) -> None:
    [stream] = streams
    async for output in stream:
        raise_error(output)
        for _ in writer.take(output):
            continue


async def _events(streams: Sequence[Outputs], writer: MessageWriter) -> AsyncGenerator[bytes]:
    [stream] = streams
    encoder = msgspec.json.Encoder()
    try:
        for data in writer.begin():
            yield event(encoder.encode(data), data["type"])
        async for output in stream:
            raise_error(output)
            for data in writer.take(output):
                yield event(encoder.encode(data), data["type"])
    except Exception as error:
        yield event(_error_json(_refusal(error)), "error")


def _refusal(error: BaseException) -> Refusal:
    """`error` with the phrase by which clients of this API recognise a prompt that is too long."""
    refusal = as_refusal(error)
    if isinstance(error, PromptTooLong):
        sizes = f"{error.num_tokens} tokens > {error.max_model_len} maximum"
        refusal.info.message = f"prompt is too long: {sizes}. {refusal.info.message}"
    return refusal


def _error_json(refusal: Refusal) -> bytes:
    kind = _KINDS.get(refusal.status, "api_error")
    error: dict[str, Any] = {"type": kind, "message": refusal.info.message}
    if refusal.info.param == "thread":  # so that clients send whole conversations from now on
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return msgspec.json.encode({"type": "error", "error": error})


def error_response(error: BaseException) -> Response:
    """`error` as a whole response of this API."""
    refusal = _refusal(error)
    return Response(_error_json(refusal), refusal.status, headers=refusal.headers, media_type=JSON)
