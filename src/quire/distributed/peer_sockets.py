"""Sockets between processes that have told each other where they listen: to one of any host, and to
one of this host for a descriptor of memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import PeersLost

_TOKEN_BYTES = 16
_GREETING_S = 10.0
"""Seconds that whoever connects may take to say who it is."""
_PORT = struct.Struct("<H")
_CREDENTIALS = struct.Struct("3i")


class PeerListener:
    """A port of this host for one process, which must know the token that `told` has."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address`: of this host, as others reach it. Raises PeersLost where it cannot be had."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise PeersLost(f"Nobody can connect to {address}: {error}") from error
        self._socket.settimeout(timeout_s)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        port = self._socket.getsockname()[1]
        self.told = _PORT.pack(port) + self._token + address.encode()

    def fileno(self) -> int:
        """The descriptor, which is readable when somebody connects."""
        return self._socket.fileno()

    def accept(self) -> socket.socket:
        """Wait for the process that knows the token; others are sent away."""
        while True:
            try:
                found, _ = self._socket.accept()
            except OSError as error:
                raise PeersLost(f"Another one of the group did not come: {error}") from error
            with contextlib.suppress(OSError):
                found.settimeout(_GREETING_S)
                said = found.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
                if secrets.compare_digest(said, self._token):
                    return _plain(found)
            found.close()

    def close(self) -> None:
        self._socket.close()


def call(told: bytes, timeout_s: float) -> socket.socket:
    """A connection to a `PeerListener` by what it has `told`. Raises PeersLost."""
    (port,), rest = _PORT.unpack_from(told), told[_PORT.size :]
    try:
        found = socket.create_connection((rest[_TOKEN_BYTES:].decode(), port), timeout_s)
        found.sendall(rest[:_TOKEN_BYTES])
    except OSError as error:
        raise PeersLost(f"Another one of the group is not reached: {error}") from error
    return _plain(found)


def address_towards(address: str, port: int) -> str:
    """The address of this host by which it reaches another one; nothing is sent. Raises OSError for
    one that cannot be reached.
    """
    family, *_, there = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def _plain(found: socket.socket) -> socket.socket:
    found.settimeout(None)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


# descriptors


@contextmanager
def listening_here() -> Iterator[tuple[socket.socket, bytes]]:
    """A socket for processes of this host, in no folder, and its name."""
    name = b"\0quire-" + secrets.token_hex(16).encode()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        yield listener, name


def accept_user(listener: socket.socket, timeout_s: float) -> socket.socket:
    """The next process of this user that connects; others are sent away. Raises PeersLost."""
    listener.settimeout(timeout_s)
    while True:
        try:
            found, _ = listener.accept()
        except OSError as error:
            raise PeersLost(f"Another one of the group did not come: {error}") from error
        with contextlib.suppress(OSError):
            told = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(told)
            if uid == os.getuid():
                return found
        found.close()


def send_descriptor(listener: socket.socket, fd: int, timeout_s: float) -> None:
    """Send a descriptor to the next process of this user that connects. Raises PeersLost."""
    while True:
        with accept_user(listener, timeout_s) as found, contextlib.suppress(OSError):
            socket.send_fds(found, [b"\0"], [fd])
            return


def receive_descriptor(name: bytes, timeout_s: float) -> int:
    """The descriptor that the process sends which listens by this name. Raises PeersLost."""
    link, fd = link_with_descriptor(name, timeout_s)
    link.close()
    return fd


def link_with_descriptor(name: bytes, timeout_s: float) -> tuple[socket.socket, int]:
    """A connection to the process that listens by this name, and the descriptor that it sends.
    Raises PeersLost.
    """
    found = socket.socket(socket.AF_UNIX)
    try:
        found.settimeout(timeout_s)
        found.connect(name)
        _, descriptors, _, _ = socket.recv_fds(found, 1, 1)
    except OSError as error:
        found.close()
        raise PeersLost(f"The memory of the group was not received: {error}") from error
    if not descriptors:
        found.close()
        raise PeersLost("The memory of the group was not received: its owner has ended.")
    return found, descriptors[0]
