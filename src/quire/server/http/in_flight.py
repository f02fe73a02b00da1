"""The requests in progress: counted and named here, given up with their clients, and the middleware
around each of them, which gives it an id, writes its line of the access log and answers where a
handler fails.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.shared_cores.load_board import Neighbours
from quire.server.http.failures import error_response
from quire.server.http.fields import (
    CUT_HEADER,
    CUT_SLOT,
    HEADER,
    IGNORED_SLOT,
    LOST_HEADER,
    LOST_SLOT,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

ID_SLOT = "quire.request_id"
"""Key of the request's id in the state of its scope."""
TRACE_SLOT = "quire.traceparent"
"""Key of the `traceresponse` header of the request's span, once it has one."""
_MAX_NAMES = 32
"""The most ignored fields that the header names."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
# what probes and the open page poll would count as load, and keep a server that drains from its end
_UNCOUNTED = frozenset(
    (
        *("/health", "/ping", "/ready", "/load", "/version", "/metrics"),
        *("/page/facts", "/page/drawing", "/page/history"),
    )
)


def own_request_id(connection: HTTPConnection) -> str | None:
    """The X-Request-Id that the client gave; None without one that can be sent back."""
    given = connection.headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else None


class InFlightRequests:
    """Counts and names of requests in progress; belongs to one event loop.

    `is_draining`: the server is shutting down, so that `/ready` answers 503. `neighbours` are the
    other API servers of the same engine.
    """

    def __init__(self, neighbours: Neighbours | None = None) -> None:
        self._neighbours = neighbours
        self.num_requests = 0
        self.is_draining = False
        self._keys: dict[str, str] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._count(1)
        self._idle.clear()
        try:
            yield
        finally:
            self._count(-1)
            # of this process only: each server drains its own
            if not self.num_requests:
                self._idle.set()

    @property
    def has_neighbours(self) -> bool:
        """Whether this is one of several API servers."""
        return self._neighbours is not None

    @property
    def num_everywhere(self) -> int:
        """The requests in progress here and at the neighbours."""
        others = 0 if self._neighbours is None else int(self._neighbours.load().num_answered)
        return self.num_requests + others

    def _count(self, change: int) -> None:
        self.num_requests += change
        if self._neighbours is not None:
            self._neighbours.tell(num_answered=self.num_requests)

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    def enter(self, key: str, shown: str) -> None:
        """The engine has a request `key`, which its client knows as `shown`."""
        self._keys[key] = shown

    def leave(self, key: str) -> None:
        """The engine is done with `key`. Idempotent."""
        self._keys.pop(key, None)

    def keys(self, shown: Collection[str] | None = None) -> list[str]:
        """The engine's names of the requests that clients know by these (None: of all)."""
        return [key for key, name in self._keys.items() if shown is None or name in shown]


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; cancelled, and ClientDisconnect raised, when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnected(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        # both may be done at once; work that is done is not thrown away
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class WithoutSlash:
    """Serves paths with a slash at their end as without; a redirection would lose the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope["path"] = scope["path"].removesuffix("/")
        await self._app(scope, receive, send)


class WithoutRoot:
    """Serves a path below `root` as the one without, for proxies that strip it and others."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = "/" + root.strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._root}/"):
            scope["path"] = scope["path"].removeprefix(self._root) or "/"
        await self._app(scope, receive, send)


class InFlightMiddleware:
    """The outermost layer. `shows_ids`: replies carry X-Request-Id; `logs`: a line after each."""

    def __init__(
        self, app: ASGIApp, in_flight: InFlightRequests, *, shows_ids: bool, logs: bool
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._shows_ids = shows_ids
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = own_request_id(HTTPConnection(scope)) or secrets.token_hex(16)
        scope.setdefault("state", {})[ID_SLOT] = name
        reply = _LoggedSend(send, name if self._shows_ids else None, scope["state"])
        start = time.monotonic()
        try:
            if scope["path"] in _UNCOUNTED:
                await self._answer(scope, receive, reply)
            else:
                with self._in_flight.counted():
                    await self._answer(scope, receive, reply)
        finally:
            if self._logs:
                _log(scope, reply, name, time.monotonic() - start)

    async def _answer(self, scope: Scope, receive: Receive, reply: _LoggedSend) -> None:
        try:
            await self._app(scope, receive, reply)
        except Exception as error:
            response = error_response(error)
            # a stream that has begun cannot have another status: its connection is closed instead
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
            if IGNORED_SLOT in self._state:
                # the names are the client's, and only ASCII is safe in a header (RFC 9110, 5.5)
                names = ", ".join(self._state[IGNORED_SLOT][:_MAX_NAMES])
                headers.append((HEADER, names.encode("ascii", "backslashreplace")))
            if CUT_SLOT in self._state:
                headers.append((CUT_HEADER, self._state[CUT_SLOT].encode("ascii")))
            if LOST_SLOT in self._state:
                headers.append((LOST_HEADER, self._state[LOST_SLOT].encode("ascii")))
            message = {**message, "headers": headers}
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)


def _log(scope: Scope, reply: _LoggedSend, name: str, seconds: float) -> None:
    client: Any = scope.get("client") or ("-", 0)
    # still percent-encoded: a decoded path could have line breaks and write lines of its own
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
