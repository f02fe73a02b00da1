"""A call of an ASGI app in this process: what a client would send and get, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(slots=True)
class DirectReply:
    """Answer of the app; header names are in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def post(
    app: ASGIApp, path: str, body: bytes, request_id: str, state: Mapping[str, Any] | None = None
) -> DirectReply:
    """POST a JSON body. Cancelling the call is what going away is to a client. `state`: that of the
    request's scope, for an app without the middleware that fills it.
    """
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": dict(state or {}),
    }
    reply, pieces = DirectReply(), []
    sent = asyncio.Event()

    async def receive() -> Message:
        if not sent.is_set():
            sent.set()
            return {"type": "http.request", "body": body, "more_body": False}
        # a client that is gone would end the request
        return await _never()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode("latin-1").lower(): v.decode("latin-1")
                             for k, v in message.get("headers", ())}  # fmt: skip
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    reply.body = b"".join(pieces)
    return reply


async def _never() -> Message:
    """The client stays until it is cancelled."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")
