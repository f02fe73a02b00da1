"""Serving an app on sockets until a signal comes, then draining the requests in progress."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from quire.errors import InvalidParameter
from quire.processes.owner_signals import OWNER_SIGNALS
from quire.server.http.acceptor import Acceptor, most_connections
from quire.server.http.connection import Connections, bounded_protocol

logger = logging.getLogger(__name__)

_FLUSH_S = 5.0
"""Time for replies to reach their clients after the last request has ended, in seconds."""
_BACKLOG = 2048
_CIPHERS = "TLSv1"  # uvicorn's default, which means OpenSSL's own list


@dataclass(frozen=True, slots=True)
class Tls:
    """Files and settings of TLS; `certfile` None: plain HTTP."""

    certfile: str | None = None
    keyfile: str | None = None
    keyfile_password: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str | None = None


@dataclass(frozen=True, slots=True)
class Listening:
    """Acceptance and bounds of connections."""

    tls: Tls = Tls()
    keep_alive_s: float = 5.0
    max_header_bytes: int = 64 * 2**10
    header_timeout_s: float = 20.0


def bind(host: str | None, port: int, uds: str | None) -> socket.socket:
    """A listening socket: taken before the engine starts, so that the port cannot be lost.

    Raises InvalidParameter for an address that cannot be had.
    """
    try:
        if uds is not None:
            return _bind_unix(uds)
        family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host or "127.0.0.1", port))
        return listener
    except OSError as error:
        text = error.strerror or str(error)
        if uds is not None:
            raise InvalidParameter("--uds", uds, text) from None
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            hint = "Give an address of this machine: 0.0.0.0 stands for all of them."
            raise InvalidParameter("--host", host, text, hint) from None
        raise InvalidParameter("--port", f"{host or '127.0.0.1'}:{port}", text) from None


def bind_shared(host: str | None, port: int, uds: str | None, count: int) -> list[socket.socket]:
    """Such sockets at one address, one for each of several processes: the system spreads
    connections over them (Linux). Elsewhere, and at a path, they are the same socket.

    While they are open, connections that a process had not accepted when it died wait in them.
    """
    # without SO_REUSEPORT, with which another server's sockets at this address would be joined
    probe = bind(host, port, uds)
    if uds is not None or sys.platform != "linux":
        return [probe, *(probe.dup() for _ in range(count - 1))]
    name: Any = probe.getsockname()
    family = probe.family
    probe.close()  # no other process listens there
    found = []
    for _ in range(count):
        listener = socket.socket(family, socket.SOCK_STREAM)
        found.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind(name)
        except OSError as error:
            raise InvalidParameter("--port", name[1], error.strerror or str(error)) from None
    return found


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(path):
        # a dead server leaves its file behind; a connection tells it from one that is in use
        with contextlib.suppress(OSError):
            listener.connect(path)
            raise InvalidParameter("--uds", path, "another server listens there")
        os.unlink(path)
        listener.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    # nobody can have connected: the socket does not listen yet
    os.chmod(path, 0o600)
    return listener


def address_of(listener: socket.socket, tls: Tls) -> str:
    """Address at which a client finds the server."""
    name: Any = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if tls.certfile else 'http'}://{host}:{name[1]}"


class Listener(uvicorn.Server):
    """uvicorn's server with our acceptors and no signal handlers; `accepts` once it does."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, handshake_timeout_s: float
    ) -> None:
        super().__init__(config)
        self.accepts = asyncio.Event()
        self._connections = connections
        self._handshake_timeout_s = handshake_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        acceptors = [
            Acceptor(
                each,
                self._connections,
                self._make_protocol,
                self.config.ssl,
                self._handshake_timeout_s,
            )
            for each in sockets or ()
        ]
        for acceptor in acceptors:
            acceptor.start(self.config.backlog)
        # uvicorn's shutdown closes what stands here
        self.servers = cast(Any, acceptors)
        self.started = True
        self.accepts.set()

    def _make_protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = cast(Any, self.config.http_protocol_class)(
            config=self.config, server_state=self.server_state, app_state={}
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield


def check_tls(tls: Tls) -> None:
    """Raise InvalidParameter for files that cannot be used, before an engine is started."""
    if tls.certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certfile, tls.keyfile, tls.keyfile_password)
        if tls.ca_certs is not None:
            context.load_verify_locations(tls.ca_certs)
        if tls.ciphers is not None:
            context.set_ciphers(tls.ciphers)
    except OSError as error:  # ssl.SSLError is one
        raise InvalidParameter("--ssl-certfile", tls.certfile, str(error)) from None


def make_listener(app: ASGIApp, how: Listening, most: int | None = None) -> Listener:
    """A server of `app` that answers connections as `how` says; its files were checked. `most`
    connections may be open at once (None: as many as there are descriptors for).
    """
    tls = how.tls
    limit = most_connections() if most is None else most
    connections = Connections(limit, has_tls=tls.certfile is not None)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(how.max_header_bytes, how.header_timeout_s, connections),
        ws="none",
        lifespan="off",
        # uvicorn's own would change the logging of the whole process
        log_config=None,
        access_log=False,
        server_header=False,
        # any client could claim another's address by X-Forwarded-For
        proxy_headers=False,
        timeout_keep_alive=how.keep_alive_s,  # type: ignore[arg-type]
        backlog=_BACKLOG,
        ssl_certfile=tls.certfile,
        ssl_keyfile=tls.keyfile,
        ssl_keyfile_password=tls.keyfile_password,
        ssl_ca_certs=tls.ca_certs,
        ssl_cert_reqs=tls.cert_reqs,
        ssl_ciphers=tls.ciphers or _CIPHERS,
    )
    return Listener(config, connections, how.header_timeout_s)


class ShutdownSignal:
    """The first signal drains, the second aborts, a dead engine fails: then `exit_code` is 1."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.hurried = asyncio.Event()
        self.exit_code = 0

    def on_signal(self) -> None:
        (self.hurried if self.begun.is_set() else self.begun).set()

    @contextlib.contextmanager
    def by_signals(self) -> Iterator[None]:
        """Have SIGTERM and SIGINT call `on_signal`; then they are ignored: the process exits."""
        loop = asyncio.get_running_loop()
        for number in OWNER_SIGNALS:
            loop.add_signal_handler(number, self.on_signal)
        try:
            yield
        finally:
            for number in OWNER_SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def fail(self) -> None:
        """The engine is dead: stop with exit code 1."""
        self.exit_code = 1
        self.begun.set()
        self.hurried.set()


async def listen(
    listeners: Sequence[tuple[Listener, socket.socket]],
    ending: ShutdownSignal,
    *,
    on_started: Callable[[], None],
    drain: Callable[[], Awaitable[None]],
    abort: Callable[[], Awaitable[None]],
    drain_s: float,
) -> None:
    """Serve until `ending` begins, with `on_started` called when connections are accepted. Then
    wait up to `drain_s` for the requests in progress, then abort them.

    `drain` returns when no request is in progress, `abort` ends all that are.
    """
    serving = [asyncio.ensure_future(server.serve([sock])) for server, sock in listeners]
    try:
        accepted = asyncio.gather(*(server.accepts.wait() for server, _ in listeners))
        await _first(accepted, also=serving)
        if accepted.done() and not accepted.cancelled():
            on_started()
        await _first(asyncio.ensure_future(ending.begun.wait()), also=serving)
        for server, _ in listeners:
            # longer than the drain below, so that uvicorn ends no request by itself
            server.config.timeout_graceful_shutdown = int(drain_s + _FLUSH_S)
            server.should_exit = True
        logger.info(
            "Shutting down: refusing new requests, draining running ones for up to %.0f s.", drain_s
        )
        await _first(
            asyncio.ensure_future(drain()),
            asyncio.ensure_future(ending.hurried.wait()),
            asyncio.ensure_future(asyncio.sleep(drain_s)),
        )
        await abort()
        await asyncio.wait(serving, timeout=_FLUSH_S)
    finally:
        for server, _ in listeners:
            # or uvicorn waits for connections that stay open
            server.force_exit = True
        await asyncio.gather(*serving)


async def _first(*waits: asyncio.Future[Any], also: Sequence[asyncio.Future[Any]] = ()) -> None:
    """Wait for one of all; only `waits` are cancelled then."""
    await asyncio.wait([*waits, *also], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
