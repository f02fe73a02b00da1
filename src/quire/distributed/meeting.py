"""Processes that were not started by one another meet at a store, find out where each of them is,
and form groups: ranks that a launcher has started, or those of several hosts.

Nothing that is agreed on here is secret: whoever reaches the store's port can read and change it.
It is meant for networks that are one's own, as that of torch's launchers is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import distributed

from quire.distributed.network_workers import ByteGroup, NetworkWorkers
from quire.distributed.peer_sockets import (
    PeerListener,
    address_towards,
    call,
    listening_here,
    receive_descriptor,
    send_descriptor,
)
from quire.distributed.shared_group import SharedExchange, SharedGroup
from quire.distributed.worker_group import RankGroup
from quire.errors import PeersLost
from quire.hardware.native import find_native

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from quire.distributed.gloo_group import GlooGroup

LONGEST_WAIT_S = 600.0
"""Seconds that a process waits for the others, which may be loading."""


class Meeting:
    """`size` processes, of which this is number `rank`, that know each other by a store. Every call
    is made by all of them, in the same order. Raises PeersLost where some do not come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        address: str = "127.0.0.1",
        timeout_s: float = LONGEST_WAIT_S,
    ) -> None:
        """`store`: of these processes alone, as one with a prefix is. `address`: of this host, as
        the others reach it.
        """
        self.rank, self.size, self.address = rank, size, address
        self._store, self._timeout_s = store, timeout_s
        self._num_rounds = 0

    @classmethod
    def at(
        cls,
        address: str,
        port: int,
        name: str,
        rank: int,
        size: int,
        *,
        is_host: bool,
        listener_fd: int | None = None,
        timeout_s: float = LONGEST_WAIT_S,
    ) -> Meeting:
        """Meet at `address`:`port`; the one process that is the host opens the store there, others
        connect. Meetings of different names do not know of each other. `listener_fd`: a socket of
        the host that listens there already.
        """
        try:
            store = distributed.TCPStore(  # type: ignore[attr-defined]
                address,
                port,
                None,
                is_host,
                timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=listener_fd is None,
                master_listen_fd=listener_fd,
            )
        except RuntimeError as error:
            what = "opened" if is_host else "reached"
            raise PeersLost(f"The store at {address}:{port} is not {what}: {error}") from error
        own = address_towards(address, port)
        return cls(prefixed(name, store), rank, size, address=own, timeout_s=timeout_s)

    def exchange(self, what: bytes) -> list[bytes]:
        """The bytes of each process, by rank."""
        self._num_rounds += 1
        key = f"{self._num_rounds}"
        try:
            self._store.set(f"{key}/{self.rank}", what)  # type: ignore[arg-type]
            keys = [f"{key}/{rank}" for rank in range(self.size)]
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
            return [bytes(self._store.get(each)) for each in keys]
        except RuntimeError as error:
            raise PeersLost(f"The others of the group did not come: {error}") from error

    def among(self, name: str, ranks: Sequence[int]) -> Meeting:
        """The meeting of some of these processes, with this one, in the order of `ranks`; no two
        have one name. Only they call this.
        """
        return Meeting(
            prefixed(name, self._store),
            ranks.index(self.rank),
            len(ranks),
            address=self.address,
            timeout_s=self._timeout_s,
        )

    def anew(self) -> Meeting:
        """Meet again under a name that these processes have not used: each counts how often it has
        come, so that one process may have several engines, one after the other.
        """
        times = self._store.add(f"times/{self.rank}", 1)
        return self.among(f"{times}", range(self.size))

    # groups

    def open_group(self, device: str = "cpu") -> OpenedGroup:
        """Connect these processes: by shared memory where they are on one host with native code,
        else by gloo; GPUs by NCCL.
        """
        if device != "cpu":
            return OpenedGroup(NetworkWorkers(self._open_nccl), None)
        native, _ = find_native()
        # one of them without native code cannot share
        own = host_id() if native is not None else secrets.token_bytes(16)
        if len(set(self.exchange(own))) == 1:
            return self._share_memory()
        return OpenedGroup(NetworkWorkers(self.open_gloo), None)

    def open_gloo(self, number: int = 0) -> GlooGroup:
        """Connect these processes by gloo, after `number` earlier groups."""
        from quire.distributed.gloo_group import GlooGroup  # imports that few need

        store = prefixed(f"gloo-{number}", self._store)
        return GlooGroup(store, self.rank, self.size, self._timeout_s, self.address)

    def _open_nccl(self, number: int) -> ByteGroup:
        from quire.distributed.nccl_group import NcclGroup  # imports that few need

        store = prefixed(f"nccl-{number}", self._store)
        return NcclGroup(store, self.rank, self.size, self._timeout_s)

    def _share_memory(self) -> OpenedGroup:
        """Make memory on rank 0 and send the others its descriptor."""
        if self.rank:
            (name, *_) = self.exchange(b"")
            fd = receive_descriptor(name, self._timeout_s)
            try:
                return OpenedGroup(SharedGroup(fd, self.rank), None)
            finally:
                os.close(fd)
                self.exchange(b"")
        exchange = SharedExchange(self.size)
        with listening_here() as (listener, name):
            self.exchange(name)
            for _ in range(self.size - 1):
                send_descriptor(listener, exchange.fileno(), self._timeout_s)
            self.exchange(b"")
        return OpenedGroup(SharedGroup(exchange.fileno(), 0), exchange)

    # sockets

    def connect(
        self, to: int | None, by: int | None
    ) -> tuple[socket.socket | None, socket.socket | None]:
        """A socket to the process `to`, and the one from `by`; None: there is none. Who connects
        `to` another one is what that one has for `by`.
        """
        listener = None if by is None else PeerListener(self.address, self._timeout_s)
        try:
            told = self.exchange(b"" if listener is None else listener.told)
            after = None if to is None else call(told[to], self._timeout_s)
            return after, None if listener is None else listener.accept()
        finally:
            if listener is not None:
                listener.close()


class OpenedGroup:
    """A group of processes that have met."""

    def __init__(self, group: RankGroup, exchange: SharedExchange | None) -> None:
        """`exchange`: the memory of it, in the process that has made it."""
        self.group = group
        self._exchange = exchange
        self._num_joined = 0

    def rejoin(self, number: int) -> None:
        """Make the group usable again after its `number`th abort; nothing happens where that has
        been done. No process may be in a collective; all must know that each of them has called
        this before the next one.
        """
        if number == self._num_joined:
            return
        self._num_joined = number
        if self._exchange is not None:
            self._exchange.reset()
        self.group.rejoin(number)

    def close(self) -> None:
        """Give up this side, which ends the wait of the others."""
        self.group.abort("a process of the group has ended")
        if self._exchange is not None:
            self._exchange.close()


def prefixed(name: str, store: Store) -> Store:
    """A store whose keys are those of `store` with a name in front."""
    found: Store = distributed.PrefixStore(name, store)  # type: ignore[attr-defined]
    return found


def host_id() -> bytes:
    """Equal for processes that can share memory: they are of one user, on one kernel and in one
    network.
    """
    parts = [socket.gethostname(), str(os.getuid())]
    for read in (_boot_id, _network):
        with contextlib.suppress(OSError):
            parts.append(read())
    if not hasattr(os, "memfd_create"):
        parts.append(secrets.token_hex())
    return "/".join(parts).encode()


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _network() -> str:
    return os.readlink("/proc/self/ns/net")
