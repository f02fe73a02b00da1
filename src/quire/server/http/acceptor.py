"""Accepting connections while there are descriptors for them.

A part of the descriptors that the process may have is kept for everything else, such as the restart
of an engine core. When the others are used up, a connection that waits for its client makes way for
a new one; while all are busy, new ones wait to be accepted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

RESERVE = 64
"""Descriptors that connections leave to the rest of the process."""
FEW = 64
"""A limit below this is worth a warning."""
STALLED_S = 0.5
"""A connection makes way when nothing has come of an unfinished request for this long."""
_BURST = 16
"""Connections that are accepted at once; those that make way are closed only after that."""
_PAUSE_S = 0.05
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
    """How many connections the descriptors of this process suffice for, as things are now."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = max(1, limit - len(os.listdir("/dev/fd")) - RESERVE)
    if found < FEW:
        logger.warning("ulimit -n is %d: room for %d connections at a time.", limit, found)
    return found


class Connections:
    """The connections of one listener, at most `limit`, and which of them wait for their clients.

    `_unfinished`: those whose request is not whole yet, with the time of the last data; the one
    that has waited longest is first. `_idle`: those between two requests.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[Connection, Callable[[], object]] = {}
        self._unfinished: dict[Connection, float] = {}
        self._idle: dict[Connection, None] = {}

    def enter(self, connection: Connection, close: Callable[[], object]) -> None:
        """A connection was accepted; `close` ends it."""
        self._open[connection] = close
        self.note_waiting(connection)

    def opened(self, connection: Connection, close: Callable[[], object]) -> None:
        """It is `close` that ends it now."""
        if connection in self._open:
            self._open[connection] = close

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        self._open.pop(connection, None)
        self.note_busy(connection)

    def note_waiting(self, connection: Connection) -> None:
        """Its client has connected, or has begun a request."""
        self.note_busy(connection)
        self._unfinished[connection] = time.monotonic()

    def note_progress(self, connection: Connection) -> None:
        """Data came."""
        if connection in self._unfinished:
            self.note_waiting(connection)

    def note_busy(self, connection: Connection) -> None:
        """Its request has come whole."""
        self._unfinished.pop(connection, None)
        self._idle.pop(connection, None)

    def note_idle(self, connection: Connection) -> None:
        """Its request was answered."""
        if connection not in self._unfinished:
            self._idle[connection] = None

    def make_room(self) -> bool:
        """Whether one more may be accepted; the one that is the least loss is closed for it."""
        if len(self._open) < self._limit:
            return True
        victim = self._victim()
        if victim is None:
            return False
        close = self._open[victim]
        self.leave(victim)
        close()
        return True

    def _victim(self) -> Connection | None:
        """The one that has stalled for longest, else the one that is idle for longest."""
        for connection, last_sign in self._unfinished.items():
            if time.monotonic() - last_sign > STALLED_S:
                return connection
            break
        return next(iter(self._idle), None)


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

    def _pause(self, why: str) -> None:
        """Leave new connections waiting for a moment."""
        self._stop()
        self._timer = self._loop.call_later(_PAUSE_S, self._resume)
        if time.monotonic() - self._logged_at > _LOG_PAUSE_S:
            self._logged_at = time.monotonic()
            logger.warning("New connections have to wait: %s.", why)

    def _accept(self) -> None:
        for _ in range(_BURST):
            if not self._connections.make_room():
                self._pause("all that the descriptors suffice for are busy")
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
            self._connections.enter(protocol, task.cancel)
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
