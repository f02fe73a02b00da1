"""The connections of a listener, and the protocol of each one.

The more connections wait to be accepted, the sooner one that says nothing makes way: a client's
request comes with its connection, or not at all. The protocol receives the heads of requests within
bounds of size and time, answers what is not HTTP with an error in the API's shape, and serves what
offers an upgrade, to HTTP/2 for example, as HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from quire.server.http.failures import JSON, Refusal, error_json

STALLED_S = 0.5
"""A connection makes way when nothing has come of an unfinished request for this long. Each that
does halves the time, and each time that there is room doubles it again.
"""
_LEAST_STALLED_S, _LEAST_STALLED_TLS_S, _LEAST_STALLED_BODY_S = 0.01, 0.1, 0.1
"""The shortest such times: before the head of a request is whole, as long as a handshake may last,
and in a body, which networks may deliver in bursts.
"""
_UNREAD_S = 0.5
"""Seconds more for which data may be there that nobody has read, before it counts as none."""
PAUSE_S, _LEAST_PAUSE_S = 0.05, 0.002
"""Seconds for which new connections wait before it is tried again to accept them."""
_LATER = float("inf")

Connection: TypeAlias = asyncio.BaseProtocol


class Connections:
    """The connections of one listener, at most `limit`, and which of them wait for their clients.

    `_heads`: those of whose request the head is not whole yet, with the time of the last data; the
    one that has waited longest is first. `_bodies`: likewise, those of whose request the body is
    not. `_idle`: those between two requests.
    """

    def __init__(
        self, limit: int, *, has_tls: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._open: dict[Connection, Callable[[], object]] = {}
        self._has_input: dict[Connection, Callable[[], bool]] = {}
        self._heads: dict[Connection, float] = {}
        self._bodies: dict[Connection, float] = {}
        self._idle: dict[Connection, None] = {}
        self._stalled_s = STALLED_S
        self._least_s = min(STALLED_S, _LEAST_STALLED_TLS_S if has_tls else _LEAST_STALLED_S)

    def enter(
        self,
        connection: Connection,
        close: Callable[[], object],
        has_input: Callable[[], bool] = lambda: False,
    ) -> None:
        """A connection that `close` ends; `has_input`: whether it has data that nobody has read."""
        self._open[connection] = close
        self._has_input[connection] = has_input
        self.note_waiting(connection)

    def opened(self, connection: Connection, close: Callable[[], object]) -> None:
        """Note that `close` ends the connection from now on."""
        if connection in self._open:
            self._open[connection] = close

    def leave(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._has_input.pop(connection, None)
        self.note_busy(connection)

    def note_waiting(self, connection: Connection) -> None:
        """Note that its client has connected, or has begun a request."""
        self.note_busy(connection)
        self._heads[connection] = self._clock()

    def note_head(self, connection: Connection) -> None:
        """Note that the head of its request is complete."""
        self.note_busy(connection)
        self._bodies[connection] = self._clock()

    def note_progress(self, connection: Connection) -> None:
        """Note that data has come."""
        for waiting in (self._heads, self._bodies):
            if waiting.pop(connection, None) is not None:
                waiting[connection] = self._clock()

    def note_busy(self, connection: Connection) -> None:
        """Note that its request is complete."""
        for waiting in (self._heads, self._bodies, self._idle):
            waiting.pop(connection, None)

    def note_idle(self, connection: Connection) -> None:
        """Note that its request was answered."""
        if connection not in self._heads and connection not in self._bodies:
            self._idle[connection] = None

    def make_room(self) -> bool:
        """Whether one more may be accepted; the one that is the least loss is closed for it."""
        if len(self._open) < self._limit:
            # room again: patience returns as fast as it went
            self._stalled_s = min(STALLED_S, 2 * self._stalled_s)
            return True
        victim, has_unread = self._stalled()
        # an idle connection costs its client one reconnect, a stalled request costs more; but data
        # that nobody has read yet may end the stall
        if victim is None and not has_unread:
            victim = next(iter(self._idle), None)
        if victim is None:
            return False
        close = self._open[victim]
        # now and not when it is closed, so that the next in this burst is another one
        self.leave(victim)
        close()
        return True

    @property
    def next_room_s(self) -> float:
        """Seconds until `make_room` may do better, at most `PAUSE_S`."""
        due = [
            last_sign + limit_s
            for waiting, limit_s in self._limits()
            for last_sign in list(waiting.values())[:1]
        ]
        return min(PAUSE_S, max(_LEAST_PAUSE_S, min(due, default=_LATER) - self._clock()))

    def _stalled(self) -> tuple[Connection | None, bool]:
        """The one that has stalled for longest and too long, after which the next one may stall for
        less; and whether some would have stalled had their data been read, which comes first.
        """
        has_unread = False
        for waiting, limit_s in self._limits():
            for connection, last_sign in waiting.items():
                overdue_s = self._clock() - last_sign - limit_s
                if overdue_s < 0:
                    break
                if not self._has_input[connection]():
                    self._stalled_s = max(self._least_s, self._stalled_s / 2)
                    return connection, has_unread
                has_unread |= overdue_s < _UNREAD_S
        return None, has_unread

    def _limits(self) -> tuple[tuple[dict[Connection, float], float], ...]:
        body_s = max(self._stalled_s, min(STALLED_S, _LEAST_STALLED_BODY_S))
        return (self._heads, self._stalled_s), (self._bodies, body_s)


def bounded_protocol(
    max_header_bytes: int, header_timeout_s: float, connections: Connections
) -> type[HttpToolsProtocol]:
    """A protocol class for `uvicorn.Config(http=...)`.

    A head above `max_header_bytes` is answered with 431. Every byte counts from the end of the last
    body: empty lines, request line, headers, blanks. So do, in a chunked body, the bytes between
    the data of two chunks, and trailers. A connection that has not sent a whole head
    `header_timeout_s` after it began is closed. `connections` knows of each whether it waits for
    its client.
    """

    class BoundedProtocol(_Bounded):
        _max_header_bytes = max_header_bytes
        _header_timeout_s = header_timeout_s
        _all = connections

    return BoundedProtocol


class _Parser(httptools.HttpRequestParser):  # type: ignore[misc]
    """Gives `protocol` the rest of the data after a head that offers an upgrade, where the parser
    would stop, and what is wrong with a request that is not HTTP.
    """

    def __init__(self, protocol: _Bounded) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._protocol.offers_upgrade:  # and is not CONNECT, which the routes refuse
                self._protocol.serve_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            self._protocol.refuse(400, "The target of the request is not a path.")
        except httptools.HttpParserError as error:
            self._protocol.refuse(400, f"The request is not valid HTTP/1.1: {error}.")


class _Bounded(HttpToolsProtocol):
    _max_header_bytes: int
    _header_timeout_s: float
    _all: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _Parser(self)
        self._head_bytes = 0
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._all.leave(self)
        # uvicorn ends the last request that came; one that came before it may be being answered
        if (cycle := self._answered) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            self._all.note_progress(self)
        while data and not self._is_refused:
            # what ends a head, or is of a body, sets the count back
            room = self._max_header_bytes - self._head_bytes
            part, data = data[:room], data[room:]
            self._head_bytes += len(part)
            super().data_received(part)
            if self._head_bytes >= self._max_header_bytes:
                most = f"{self._max_header_bytes} bytes (--max-header-bytes)"
                self.refuse(431, f"The head of a request may have {most}; this one has more.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._all.note_waiting(self)
        self._arm()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def offers_upgrade(self) -> bool:
        """Whether the head asks for another protocol, and may be served without it."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def serve_without_upgrade(self, rest: bytes) -> None:
        """Parse the last head again without its offer, and then `rest`."""
        version = self.parser.get_http_version().encode()
        # RFC 9110, 7.8: a server may ignore the offer; the parser cannot, so it gets the head
        # without it
        lines = [b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = _Parser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def on_headers_complete(self) -> None:
        if self.offers_upgrade or self._is_refused:
            return
        self._head_bytes = 0
        self._disarm()
        if wrong := _what_is_wrong(self.parser.get_http_version(), self.headers):
            self.refuse(400, wrong)
            return
        self._all.note_head(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            self._head_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.offers_upgrade or self._is_refused:
            return
        self._head_bytes = 0
        self._all.note_busy(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._all.note_idle(self)

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless a reply to an earlier request is on its way, and close."""
        if self._is_refused or self.transport.is_closing():
            return
        # first: closing calls back into this object
        self._is_refused = True
        cycle = self._answered
        # half a reply followed by another one would be read as its body
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error_json(Refusal(status, message))
            headers = [
                *self.server_state.default_headers,
                (b"content-type", JSON.encode()),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            lines = b"".join(b"%b: %b\r\n" % each for each in headers)
            self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
        self.transport.close()

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._header_timeout_s, self._give_up)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def _what_is_wrong(version: str, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The reason to refuse a head that may mean different things to a proxy and to us (RFC 9112,
    3.2 and 6.1), or whose body could not be read.
    """
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not served; send HTTP/1.1."
    names = [name for name, _ in headers]
    if (num_hosts := names.count(b"host")) > 1 or (version == "1.1" and not num_hosts):
        return f"A request of HTTP/{version} has one Host header; this one has {num_hosts}."
    if version == "1.0" and b"transfer-encoding" in names:
        return "A request of HTTP/1.0 has no Transfer-Encoding; send a Content-Length."
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        shown = b", ".join(codings).decode("latin-1")
        return f"Transfer-Encoding: {shown} is not supported: send chunked alone."
    return None
