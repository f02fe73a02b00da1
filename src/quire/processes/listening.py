"""Addresses of this machine that processes on others connect to."""

from __future__ import annotations

import ipaddress
import socket

from quire.errors import InvalidParameter

_ANY_PORT = 0


def address_here(option: str, name: str) -> str:
    """The address, in numbers, of this machine that a host `name` or address stands for. Raises
    InvalidParameter, which names the `option`, where others could not connect to it.
    """
    try:
        ipaddress.ip_address(name)
        return name
    except ValueError:
        hint = "Give this machine's address in numbers."
    try:
        found = str(socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InvalidParameter(option, name, f"nobody knows this name: {error}", hint) from error
    if ipaddress.ip_address(found).is_loopback and name != "localhost":
        allowed = f"on this machine it stands for {found}, which other machines do not reach"
        raise InvalidParameter(option, name, allowed, hint)
    return found


def listening_at(address: str) -> socket.socket:
    """A listening socket at a free port of `address`, for a process that this one starts: the port
    stays its own while it is started again. Raises InvalidParameter for an address that is not of
    this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, _ANY_PORT), family=family)
    except OSError as error:
        hint = "Give an address of the front end's machine."
        raise InvalidParameter("data_parallel_address", address, str(error), hint) from error
