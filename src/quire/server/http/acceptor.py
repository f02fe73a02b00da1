"""Accepting connections while there are descriptors for them.

A part of the descriptors that the process may have is kept for everything else, such as the restart
of an engine core. When the others are used up, a connection that waits for its client makes way for
a new one (connection.py); while all are busy, new ones wait to be accepted.
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
from typing import Any

from quire.server.http.connection import PAUSE_S, Connections

logger = logging.getLogger(__name__)

RESERVE, _LEAST_RESERVE = 64, 24
"""Descriptors that connections leave to the rest of the process; half of them, where there are few,
but never fewer than a restart takes.
"""
FEW = 64
"""A limit below this is worth a warning."""
_BURST = 16
"""Connections that are accepted at once; those that make way are closed only after that."""
_LOG_PAUSE_S = 10.0


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


def _readable(accepted: socket.socket) -> bool:
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
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._resume()

    def close(self) -> None:
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

    def _pause(self, why: str, pause_s: float = PAUSE_S) -> None:
        """Leave new connections waiting for a moment."""
        self._stop()
        self._timer = self._loop.call_later(pause_s, self._resume)
        if time.monotonic() - self._logged_at > _LOG_PAUSE_S:
            self._logged_at = time.monotonic()
            logger.warning("New connections have to wait: %s.", why)

    def _accept(self) -> None:
        # bounded, so that a flood of connections does not keep the loop from its streams
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
