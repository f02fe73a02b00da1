"""A drain that ends nothing: `POST /drain` has another server go on with the streams of this one,
which passes on to its clients what comes. `POST /take_over` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.client.handed_over import HandedOver
from quire.engine.wire.handover import (
    ALIVE,
    BEAT_S,
    VERSION,
    HandedStream,
    Origin,
    Unpacker,
    packed,
)
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.errors import InvalidParameter
from quire.params import SamplingParams
from quire.processes.codec import BadMessage, MessageDecoder, MessageEncoder
from quire.server.context import RouteEntry, Server
from quire.server.control.drain_link import DrainTarget, LinkLost
from quire.server.http.event_stream import PieceStream
from quire.server.http.failures import Refusal
from quire.server.http.json_body import json_response

logger = logging.getLogger(__name__)

KIND = "application/x-quire-stream"


class DrainRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Another server, with its key for administration."""

    target: Annotated[str, Meta(max_length=2048)]
    api_key: Annotated[str, Meta(max_length=4096)] | None = None


async def drain(server: Server, request: Request) -> Response:
    """Have another server go on with the streams, and accept no more requests."""
    body = await server.read(request, DrainRequest)
    target = DrainTarget.of(body.target, body.api_key)
    handed = server.engine.handed_over
    if server.in_flight.has_neighbours or handed is None:
        text = "Streams are handed over by a server with one process and max_core_restarts above 0."
        raise Refusal(501, text)
    if server.in_flight.is_draining or handed.is_asking:
        raise Refusal(409, "The server is draining already.")
    handed.is_asking = True
    try:
        origin = await server.engine.get_origin()
        question = packed(MessageEncoder().encode(HandedStream(VERSION, origin)))
        has_same_root = await target.ask(question)
    except LinkLost as error:
        raise Refusal(error.status, f"{body.target} takes no streams: {error}") from None
    finally:
        handed.is_asking = False
    server.in_flight.is_draining = True
    server.engine.refuses = f"This server is drained: ask {body.target}."
    try:
        given = await _hand_over(server, handed, target, origin)
    except BaseException:
        server.in_flight.is_draining, server.engine.refuses = False, None
        raise
    logger.info("%d streams go on at %s.", given, body.target)
    front_end = server.engine.front_end
    left = front_end.outputs.num_unfinished + len(front_end.taken_over) - len(handed)
    return json_response(
        {
            "status": "draining",
            "handed_over": given,
            "finishing_here": left,
            "same_root": has_same_root,
            "kv": "pulled or computed" if has_same_root else "computed again",
        }
    )


async def _hand_over(
    server: Server, handed: HandedOver, target: DrainTarget, origin: Origin
) -> int:
    """Begin a connection for each stream; returns how many. Where that fails, all go on here."""
    engine = server.engine
    was_paused = await engine.is_paused()
    handles: list[int] = []
    try:
        if not was_paused:  # what the steps in flight compute has come when this returns
            await engine.pause_generation("keep", clear_cache=False)
        handles = handed.candidates()
        transfers = dict(await engine.hand_over(handles))
        count = 0
        for handle in handles:
            link = _Follower(server, target, handle)
            request = handed.give(handle, transfers.get(handle), link.close)
            if request is not None:
                link.start(HandedStream(VERSION, origin, request))
                count += 1
    except BaseException:
        # one of several cores may have dropped its requests before another one died
        handed.send_again(handles)
        raise
    finally:
        if not was_paused:
            await engine.resume_generation()
    return count


class _Follower:
    """The connection of one stream."""

    def __init__(self, server: Server, target: DrainTarget, handle: int) -> None:
        self._engine, self._target, self._handle = server.engine, target, handle
        self._task: asyncio.Task[None] | None = None

    def start(self, stream: HandedStream) -> None:
        """Send the stream, and take in what comes of it."""
        self._task = asyncio.create_task(self._follow(packed(MessageEncoder().encode(stream))))

    def close(self) -> None:
        """Leave: the other server ends the stream."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self, message: bytes) -> None:
        handed, handle = self._engine.handed_over, self._handle
        assert handed is not None, "it has given the stream"
        decoder = MessageDecoder(EngineCoreOutputs, takes_functions=False)
        unpacker = Unpacker()
        try:
            async with contextlib.aclosing(self._target.follow(message)) as parts:
                async for part in parts:
                    for frames in unpacker.feed(part):
                        if frames:
                            handed.take(handle, decoder.decode(frames))
                    if handle not in handed:
                        return
        except (LinkLost, BadMessage) as error:
            logger.warning("A stream goes on here again: %s", error)
        except Exception:
            logger.exception("A stream goes on here again.")
        handed.take_back([handle])


async def take_over(server: Server, request: Request) -> Response:
    """Go on with a stream of another server, or say whether that could be."""
    stream = _stream_in(await server.read_bytes(request))
    if server.in_flight.has_neighbours:
        raise Refusal(501, "Streams are taken over by a server with one process.")
    handed = server.engine.handed_over
    # refused before anything stops there; that includes a server that would drain to itself
    if server.in_flight.is_draining or (handed is not None and handed.is_asking):
        raise Refusal(503, "The server is draining.")
    own = await server.engine.get_origin()
    if stream.version != VERSION:
        raise Refusal(409, f"The version of messages is {VERSION} here.")
    if not own.model or own.model != stream.origin.model:
        text = "The model, its weights or its settings of sampling are others, or have changed."
        raise Refusal(409, text)
    has_same_root = bool(own.root) and own.root == stream.origin.root
    if stream.request is None:
        return json_response({"same_root": has_same_root})
    _check(stream.request)
    outputs: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
    handle = server.engine.take_over(stream.request, outputs.put_nowait)
    return _TakenStream(server, handle, outputs)


class _TakenStream(PieceStream):
    """The outputs of a stream that is taken over, which ends with the connection."""

    def __init__(
        self, server: Server, handle: int, outputs: asyncio.Queue[EngineCoreOutputs | None]
    ) -> None:
        stall_s = server.limits.reader_timeout_s
        super().__init__(_pieces(outputs), media_type=KIND, stall_s=stall_s)
        self._server, self._handle = server, handle

    async def on_end(self) -> None:
        self._server.engine.leave(self._handle)


async def _pieces(outputs: asyncio.Queue[EngineCoreOutputs | None]) -> AsyncGenerator[bytes]:
    encoder = MessageEncoder()
    yield ALIVE
    while True:
        try:
            found = await asyncio.wait_for(outputs.get(), BEAT_S)
        except TimeoutError:
            yield ALIVE
            continue
        if found is None:
            return  # without an end: the other server goes on
        yield packed(encoder.encode(found))
        if found.finished:
            return


def _stream_in(body: bytes) -> HandedStream:
    """The message of a body. Raises InvalidParameter."""
    try:
        [frames] = Unpacker().feed(body)
        return MessageDecoder(HandedStream, takes_functions=False).decode(frames)
    except (BadMessage, ValueError) as error:
        raise InvalidParameter("body", body[:16], f"a stream to go on with ({error})") from None


def _check(request: EngineCoreRequest) -> None:
    """Raise InvalidParameter for a stream that is more than its message."""
    if not isinstance(request.params, SamplingParams) or request.adapter or request.media:
        raise InvalidParameter("request", request.handle, "text that is generated from tokens")
    if request.resumable or request.continues:
        raise InvalidParameter("request", request.handle, "a prompt that is whole")


DRAIN_ROUTES: tuple[RouteEntry, ...] = (
    RouteEntry("POST", "/drain", drain, DrainRequest),
    RouteEntry("POST", "/take_over", take_over),
)
