"""Accepting connections while there are descriptors for them.

A part of the descriptors that the process may have is kept for everything else, such as the restart
of an engine core. When the others are used up, a connection that waits for its client makes way for
a new one; while all are busy, new ones wait to be accepted. The more connections wait, the sooner
one that says nothing makes way: a client's request comes with its connection, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

RESERVE, _LEAST_RESERVE = 64, 24
"""Descriptors that connections leave to the rest of the process; half of them, where there are few,
but never fewer than a restart takes.
"""
FEW = 64
"""A limit below this is worth a warning."""
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
_BURST = 16
"""Connections that are accepted at once; those that make way are closed only after that."""
_PAUSE_S, _LEAST_PAUSE_S = 0.05, 0.002
_LATER = float("inf")
_LOG_PAUSE_S = 10.0

Connection: TypeAlias = asyncio.BaseProtocol


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may ask for."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system's own limit is lower
        return


def most_connections() -> int:
    """Number of connections for which the free descriptors of this process suffice."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = limit - len(os.listdir("/dev/fd"))
    found = max(1, free - min(RESERVE, max(_LEAST_RESERVE, free // 2)))
    if found < FEW:
        logger.warning("ulimit -n is %d: room for %d connections at a time.", limit, found)
    return found


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
        """A connection was accepted; `close` ends it. `has_input`: whether data of its client is
        there that nobody has read yet.
        """
        self._open[connection] = close
        self._has_input[connection] = has_input
        self.note_waiting(connection)

    def opened(self, connection: Connection, close: Callable[[], object]) -> None:
        """It is `close` that ends it now."""
        if connection in self._open:
            self._open[connection] = close

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        self._open.pop(connection, None)
        self._has_input.pop(connection, None)
        self.note_busy(connection)

    def note_waiting(self, connection: Connection) -> None:
        """Its client has connected, or has begun a request."""
        self.note_busy(connection)
        self._heads[connection] = self._clock()

    def note_head(self, connection: Connection) -> None:
        """The head of its request has come whole."""
        self.note_busy(connection)
        self._bodies[connection] = self._clock()

    def note_progress(self, connection: Connection) -> None:
        """Data came."""
        for waiting in (self._heads, self._bodies):
            if waiting.pop(connection, None) is not None:
                waiting[connection] = self._clock()

    def note_busy(self, connection: Connection) -> None:
        """Its request has come whole."""
        for waiting in (self._heads, self._bodies, self._idle):
            waiting.pop(connection, None)

    def note_idle(self, connection: Connection) -> None:
        """Its request was answered."""
        if connection not in self._heads and connection not in self._bodies:
            self._idle[connection] = None

    def make_room(self) -> bool:
        """Whether one more may be accepted; the one that is the least loss is closed for it."""
        if len(self._open) < self._limit:
            self._stalled_s = min(STALLED_S, 2 * self._stalled_s)
            return True
        victim, has_unread = self._stalled()
        if victim is None and not has_unread:
            victim = next(iter(self._idle), None)
        if victim is None:
            return False
        close = self._open[victim]
        self.leave(victim)
        close()
        return True

    @property
    def next_room_s(self) -> float:
        """Seconds until `make_room` may do better, at most `_PAUSE_S`."""
        due = [
            last_sign + limit_s
            for waiting, limit_s in self._limits()
            for last_sign in list(waiting.values())[:1]
        ]
        return min(_PAUSE_S, max(_LEAST_PAUSE_S, min(due, default=_LATER) - self._clock()))

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


def _readable(accepted: socket.socket) -> bool:
    """Whether something can be read from a connection's socket."""
    if accepted.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(accepted, select.POLLIN)
    return bool(poll.poll(0))


class Acceptor:
    """Accepts the connections of one listening socket; has what uvicorn asks of a server."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: Callable[[], Any],
        context: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s if context is not None else None
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._logged_at = -_LOG_PAUSE_S
        self._is_closed = False

    def start(self, backlog: int) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        self._is_closed = True
        self._stop()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._loop.remove_reader(self._listener)

    def _pause(self, why: str, pause_s: float = _PAUSE_S) -> None:
        """Leave new connections waiting for a moment."""
        self._stop()
        self._timer = self._loop.call_later(pause_s, self._resume)
        if time.monotonic() - self._logged_at > _LOG_PAUSE_S:
            self._logged_at = time.monotonic()
            logger.warning("New connections have to wait: %s.", why)

    def _accept(self) -> None:
        for _ in range(_BURST):
            if not self._connections.make_room():
                why = "all that the descriptors suffice for are busy"
                self._pause(why, self._connections.next_room_s)
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # no descriptors, no memory
                self._pause(error.strerror or str(error))
                return
            protocol = self._make_protocol()
            task = self._loop.create_task(self._open(accepted, protocol))
            self._connections.enter(protocol, task.cancel, partial(_readable, accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, protocol: Any) -> None:
        """Shake hands, if there is TLS, and have the connection made."""
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except (OSError, asyncio.CancelledError) as error:
            self._connections.leave(protocol)
            accepted.close()
            logger.debug("A connection was not opened: %s", error)
        else:
            self._connections.opened(protocol, protocol.transport.close)
