"""The engine that pulls blocks: it copies them into its own K/V memory as they come.

One thread does all of it. Blocks of a pull are written by nobody after its end was told: a pull
that makes no progress has failed, and what comes late is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
import zmq

from quire.distributed.peers.keys import PeerKeys
from quire.distributed.peers.messages import (
    NO_READ,
    VERSION,
    Beat,
    Done,
    FromServer,
    Message,
    PulledBlock,
    PullHello,
    PullWelcome,
    Read,
    digest_of,
)
from quire.distributed.peers.params import Remote
from quire.encodable import to_msgpack
from quire.step.transfers import BlockKey

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 1 << 16
"""Bytes that a message may have besides a block."""
_WINDOW = 8
"""Blocks of a pull that are under way."""
_TURN_MS = 100
_RETRY_S = 5.0
"""Seconds for which nothing is asked of a peer that has not answered."""
_IDLE_S = 60.0
"""Seconds after which a connection that nobody uses is closed."""

WriteBlock = Callable[[int, int, torch.Tensor], None]


@dataclass(slots=True, eq=False)
class _Pull:
    """Blocks that are pulled for a request: those to ask for, and those that were asked for."""

    request_id: str
    remote: Remote
    mark: Any
    to_ask: list[tuple[BlockKey, int]]
    asked: dict[BlockKey, int] = field(default_factory=dict)
    progress: float = 0.0

    @property
    def missing(self) -> set[int]:
        """The blocks that have no content yet."""
        return {*(block for _, block in self.to_ask), *self.asked.values()}


@dataclass(slots=True, eq=False)
class _Link:
    """A connection; `is_open`: the peer has welcomed it."""

    socket: zmq.Socket[bytes]
    begun: float
    used: float
    is_open: bool = False
    engine_id: str = ""
    pulls: dict[int, _Pull] = field(default_factory=dict)
    waiting: list[Message] = field(default_factory=list)


class PeerClient:
    """Pulls blocks. Its methods are called by the thread of steps."""

    def __init__(
        self,
        keys: PeerKeys,
        *,
        sizes: Sequence[int],
        root: Callable[[], str | None],
        write: WriteBlock,
        lease_s: float,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys` are those of the secret that peers have to know; `sizes`, the bytes of a block of
        each KV group; `write` copies host memory into a block of a group. A pull without progress
        for `patience_s` has failed.
        """
        self._keys, self._sizes, self._root, self._write = keys, list(sizes), root, write
        self._patience_s, self._beat_s, self._clock = patience_s, lease_s / 6, clock
        self._lock = threading.Lock()
        self._done: list[tuple[str, set[int]]] = []
        self._has_news = threading.Event()
        self.num_loaded_bytes = self.num_loaded_blocks = self.num_failed = 0
        self._links: dict[tuple[str, int], _Link] = {}
        self._down_until: dict[tuple[str, int], float] = {}
        self._held: dict[Remote, int] = {}
        """Leases of others that requests here want -> how many requests."""
        self._next = 0
        self._beaten_at = clock()
        self._decoder = msgspec.msgpack.Decoder(FromServer)
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._context = zmq.Context(io_threads=1)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv peer client", daemon=True)
        self._thread.start()

    # The thread of steps

    def hold(self, remote: Remote) -> None:
        """Keep a lease alive until `release`."""
        self._submit(partial(self._hold, remote))

    def release(self, remote: Remote) -> None:
        """A lease is not wanted any more."""
        self._submit(partial(self._release, remote))

    def pull(
        self, request_id: str, remote: Remote, blocks: Sequence[tuple[int, BlockKey]], mark: Any
    ) -> None:
        """Fill blocks with the contents of their names; `take_done` tells when it has ended. mark:
        of work on the device that still uses the blocks; None: there is none.
        """
        pull = _Pull(request_id, remote, mark, [(key, block) for block, key in blocks])
        self._submit(partial(self._begin, pull))

    def take_done(self) -> list[tuple[str, set[int]]]:
        """The requests whose pulls have ended, and their blocks without content; each once."""
        with self._lock:
            done, self._done = self._done, []
            self._has_news.clear()
        return done

    def wait(self, timeout_s: float) -> None:
        """Wait for a pull to end, at most for `timeout_s`."""
        self._has_news.wait(timeout_s)

    def end_all(self) -> None:
        """End all pulls: no block is written when this returns."""
        is_done = threading.Event()
        self._submit(partial(self._end_all, is_done))
        is_done.wait()

    def close(self) -> None:
        self._is_closed = True
        self._submit(lambda: None)
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _submit(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._wake.send(b"x")

    # The thread that pulls

    def _run(self) -> None:
        self._root()  # may read the model's files, while nothing waits for a pull yet
        while not self._is_closed:
            try:
                self._turn()
            except Exception:
                logger.exception("A pull of K/V has failed.")
        for link in self._links.values():
            link.socket.close(_TURN_MS)
        self._context.term()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for link in self._links.values():
            poller.register(link.socket, zmq.POLLIN)
        ready = dict(poller.poll(_TURN_MS))
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        while not self._commands.empty():
            self._commands.get()()
        for address, link in list(self._links.items()):
            if link.socket in ready:
                self._take(address, link)
        self._look_at_times()

    def _take(self, address: tuple[str, int], link: _Link) -> None:
        # no more at a time: other peers, and the times, have their turn
        for _ in range(_WINDOW):
            if not link.socket.poll(0):
                return
            frames = link.socket.recv_multipart(copy=False)
            try:
                message = self._decoder.decode(frames[0].buffer)
            except msgspec.DecodeError as error:
                self._fail(address, f"its message is not about blocks ({error})")
                return
            if isinstance(message, PullWelcome):
                if not self._welcomed(address, link, message):
                    return
            elif isinstance(message, PulledBlock):
                self._fill(link, message, frames[1:])
            elif message.number == NO_READ:
                self._fail(address, message.reason, retry_s=0.0)
                return
            elif (pull := link.pulls.get(message.number)) is not None:
                self._end(link, message.number, pull, message.reason)

    def _welcomed(self, address: tuple[str, int], link: _Link, message: PullWelcome) -> bool:
        refusal = message.refusal
        if not refusal and message.sizes != self._sizes:
            refusal = f"its blocks have {message.sizes} bytes, and {self._sizes} here"
        if refusal:
            self._fail(address, refusal)
            return False
        link.is_open, link.engine_id = True, message.engine_id
        for waiting in link.waiting:
            self._send(link, waiting)
        link.waiting.clear()
        for number, pull in list(link.pulls.items()):
            self._ask(link, number, pull)
        return True

    def _ask(self, link: _Link, number: int, pull: _Pull) -> None:
        """Ask for the next blocks of a pull, if few are under way."""
        if pull.remote.engine_id and pull.remote.engine_id != link.engine_id:
            self._end(link, number, pull, "another engine is at its address now")
            return
        count = _WINDOW - len(pull.asked)
        # half a window at least: one message asks for several blocks
        if not pull.to_ask or count < _WINDOW // 2:
            return
        now, pull.to_ask = pull.to_ask[:count], pull.to_ask[count:]
        pull.asked |= dict(now)
        self._send(link, Read(number, pull.remote.lease, [key for key, _ in now]))

    def _fill(self, link: _Link, message: PulledBlock, frames: Sequence[zmq.Frame]) -> None:
        pull = link.pulls.get(message.number)
        if pull is None:
            return  # it was given up
        key = message.key, message.group
        block = pull.asked.get(key)
        if block is None or len(frames) != 1:
            self._end(link, message.number, pull, "it sent what was not asked for")
            return
        content = frames[0].buffer
        if len(content) != self._sizes[message.group]:
            self._end(link, message.number, pull, f"it sent a block of {len(content)} bytes")
            return
        if digest_of(*key, content) != message.digest:
            self._end(link, message.number, pull, "a block does not have its digest")
            return
        if pull.mark is not None:
            pull.mark.wait()
            pull.mark = None
        self._write(message.group, block, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        del pull.asked[key]
        pull.progress = self._clock()
        self.num_loaded_bytes += len(content)
        self.num_loaded_blocks += 1
        if pull.missing:
            self._ask(link, message.number, pull)
        else:
            self._end(link, message.number, pull, "")

    def _begin(self, pull: _Pull) -> None:
        address = pull.remote.host, pull.remote.port
        pull.progress = now = self._clock()
        # waiting for it would delay each request by the patience, and its K/V can be computed
        if now < self._down_until.get(address, 0.0):
            self._report(pull)
            return
        link = self._link(address)
        if link is None:
            self._report(pull)
            return
        self._next += 1
        link.pulls[self._next] = pull
        if link.is_open:
            self._ask(link, self._next, pull)

    def _link(self, address: tuple[str, int]) -> _Link | None:
        """The connection to a peer, which begins with `PullHello`; None: there cannot be one."""
        root = self._root()
        if root is None:  # also where there is a connection, of the time before weights changed
            return None
        link, now = self._links.get(address), self._clock()
        if link is None:
            try:
                link = _Link(self._connected(*address), begun=now, used=now)
            except zmq.ZMQError as error:
                logger.warning("No K/V is pulled from %s:%d: %s", *address, error)
                return None
            self._links[address] = link
            self._send(link, PullHello(VERSION, root))
        link.used = now
        return link

    def _connected(self, host: str, port: int) -> zmq.Socket[bytes]:
        """A socket to a peer. Raises ZMQError, also where there are too many."""
        found = self._context.socket(zmq.DEALER)
        found.linger = 0
        found.maxmsgsize = max(self._sizes) + _MESSAGE_BYTES
        found.curve_serverkey = self._keys.public
        found.curve_publickey, found.curve_secretkey = zmq.curve_keypair()
        try:
            if ":" in host:
                found.ipv6 = True
            found.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
        except zmq.ZMQError:
            found.close()
            raise
        return found

    def _hold(self, remote: Remote) -> None:
        self._held[remote] = self._held.get(remote, 0) + 1

    def _release(self, remote: Remote) -> None:
        left = self._held.pop(remote, 1) - 1
        if left:
            self._held[remote] = left
            return
        address = remote.host, remote.port
        # without this word the lease ends by itself
        if self._clock() >= self._down_until.get(address, 0.0):
            self._tell(address, Done(remote.lease))

    def _tell(self, address: tuple[str, int], message: Message) -> None:
        link = self._link(address)
        if link is not None and link.is_open:
            self._send(link, message)
        elif link is not None:
            link.waiting.append(message)

    def _look_at_times(self) -> None:
        now = self._clock()
        self._down_until = {each: end for each, end in self._down_until.items() if end > now}
        for address, link in list(self._links.items()):
            oldest = min((pull.progress for pull in link.pulls.values()), default=now)
            is_silent = not link.is_open and now - link.begun > self._patience_s
            if now - oldest > self._patience_s or (is_silent and not link.pulls):
                self._fail(address, f"it has not answered for {self._patience_s:g} s")
            elif not link.pulls and now - link.used > _IDLE_S:
                link.socket.close()
                del self._links[address]
        if now - self._beaten_at > self._beat_s:
            self._beaten_at = now
            wanted: dict[tuple[str, int], list[str]] = {}
            for remote in self._held:
                wanted.setdefault((remote.host, remote.port), []).append(remote.lease)
            for address, leases in wanted.items():
                if now >= self._down_until.get(address, 0.0):
                    self._tell(address, Beat(leases))

    def _fail(self, address: tuple[str, int], why: str, retry_s: float = _RETRY_S) -> None:
        """Give up on a peer for a while, with all that is pulled from it."""
        link = self._links.pop(address)
        self._down_until[address] = self._clock() + retry_s
        logger.warning("No K/V is pulled from %s:%d for %g s: %s.", *address, retry_s, why)
        for pull in link.pulls.values():
            self._report(pull)
        link.pulls.clear()
        link.socket.close()

    def _end(self, link: _Link, number: int, pull: _Pull, why: str) -> None:
        if why:
            where = f"{pull.remote.host}:{pull.remote.port}"
            logger.warning("K/V of request %s from %s: %s.", pull.request_id, where, why)
        del link.pulls[number]
        link.used = self._clock()
        self._report(pull)

    def _report(self, pull: _Pull) -> None:
        missing = pull.missing
        self.num_failed += bool(missing)
        with self._lock:
            self._done.append((pull.request_id, missing))
            self._has_news.set()

    def _end_all(self, is_done: threading.Event) -> None:
        for link in self._links.values():
            for pull in link.pulls.values():
                self._report(pull)
            link.pulls.clear()
        is_done.set()

    @staticmethod
    def _send(link: _Link, message: Message) -> None:
        try:
            link.socket.send(to_msgpack(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("A peer takes no messages; its blocks will be computed.")
