"""What surrounds every request: its id in the reply, one line in the log, a count, and an answer
even where a handler fails.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.failures import error_response
from quire.server.in_flight_requests import InFlightRequests

logger = logging.getLogger(__name__)

ID_SLOT = "quire.request_id"
"""Where the id of the request is, in the scope's state."""
TRACE_SLOT = "quire.traceparent"
"""Where the name of the request's span is, once it has one."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_UNCOUNTED = frozenset({"/health", "/ping", "/ready", "/load", "/version", "/metrics"})


def own_request_id(connection: HTTPConnection) -> str | None:
    """The id that the client gave in X-Request-Id; None if there is none that can be shown."""
    given = connection.headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else None


class RequestLog:
    """The outermost part of the app.

    `shows_ids`: replies carry X-Request-Id. `logs`: a line for each request, when it is over.
    """

    def __init__(
        self, app: ASGIApp, traffic: InFlightRequests, *, shows_ids: bool, logs: bool
    ) -> None:
        self._app = app
        self._traffic = traffic
        self._shows_ids = shows_ids
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = own_request_id(HTTPConnection(scope)) or secrets.token_hex(8)
        scope.setdefault("state", {})[ID_SLOT] = name
        reply = _LoggedSend(send, name if self._shows_ids else None, scope["state"])
        start = time.monotonic()
        try:
            if scope["path"] in _UNCOUNTED:
                await self._answer(scope, receive, reply)
            else:
                with self._traffic.counted():
                    await self._answer(scope, receive, reply)
        finally:
            if self._logs:
                _log(scope, reply, name, time.monotonic() - start)

    async def _answer(self, scope: Scope, receive: Receive, reply: _LoggedSend) -> None:
        try:
            await self._app(scope, receive, reply)
        except Exception as error:
            response = error_response(error)
            if reply.status is None:
                await response(scope, receive, reply)


class _LoggedSend:
    """`send` of one request: adds the headers, and remembers the status."""

    def __init__(self, send: Send, name: str | None, state: Mapping[str, Any]) -> None:
        self._send = send
        self._name = name
        self._state = state
        self.status: int | None = None
        self.num_bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ())]
            if self._name is not None:
                headers.append((b"x-request-id", self._name.encode()))
            if TRACE_SLOT in self._state:
                headers.append((b"traceresponse", self._state[TRACE_SLOT].encode()))
            message = {**message, "headers": headers}
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)


def _log(scope: Scope, reply: _LoggedSend, name: str, seconds: float) -> None:
    client: Any = scope.get("client") or ("-", 0)
    path = scope.get("raw_path", scope["path"].encode()).decode("ascii", "backslashreplace")
    logger.info(
        '%s:%d "%s %s" %s %d bytes %.1f ms %s',
        client[0],
        client[1],
        scope["method"],
        path,
        reply.status or "-",
        reply.num_bytes,
        1000 * seconds,
        name,
    )
