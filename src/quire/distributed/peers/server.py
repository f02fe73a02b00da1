"""The engine that has blocks: it keeps those of ended requests under leases, and gives them to who
knows the name of the lease and of each content.

A name of content is a digest chained over the tokens, the salt and all else that a block depends
on, so that nobody reads what it could not have asked for itself. One thread answers, and ends
leases: a block is never read after its lease has ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
import zmq

from quire.distributed.peers.keys import PeerKeys
from quire.distributed.peers.messages import (
    MOST_BLOCKS,
    NO_READ,
    VERSION,
    Beat,
    FromPuller,
    Gone,
    Message,
    PulledBlock,
    PullHello,
    PullWelcome,
    Read,
    digest_of,
)
from quire.encodable import to_msgpack
from quire.step.transfers import BlockKey

logger = logging.getLogger(__name__)

_MOST_PULLERS = 4096
_TURN_MS = 100
_LINGER_MS = 200
_MESSAGE_BYTES = 1 << 20

ReadBlock = Callable[[int, int, torch.Tensor], None]


class LeaseLimits(NamedTuple):
    """Bounds of what leases keep: blocks under any of them, how many there are, and how long one
    lasts, whoever renews it.
    """

    most_blocks: int
    most_leases: int
    longest_s: float


@dataclass(slots=True)
class _Lease:
    """Blocks of an ended request, until `ends`, which is at most `last`."""

    request_id: str
    blocks: Mapping[BlockKey, int]
    ends: float
    last: float

    def renew(self, ends: float) -> None:
        """Let it end later, but not later than it may."""
        self.ends = min(ends, self.last)


class PeerServer:
    """Serves blocks at an address. `offer`, `take_ended` and `end_all` are called by the thread of
    steps.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: PeerKeys,
        *,
        engine_id: str,
        sizes: Sequence[int],
        root: Callable[[], str | None],
        read: ReadBlock,
        lease_s: float,
        limits: LeaseLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`port` 0: a free one. `sizes` are the bytes of a block of each KV group; `read` copies a
        block of a group to host memory. Raises OSError for an address that is taken.
        """
        self.host, self.engine_id = host, engine_id
        self._sizes, self._root, self._read, self._clock = list(sizes), root, read, clock
        self._lease_s, self._limits = lease_s, limits
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._uses: Counter[int] = Counter()
        """Blocks under leases -> how many have them."""
        self._ended: list[str] = []
        self._has_news = threading.Event()
        self.num_expired = self.num_refused = 0
        self.num_sent_bytes = 0
        self._pullers: OrderedDict[bytes, str] = OrderedDict()
        """Pullers that were welcomed -> their roots."""
        self._buffer = torch.zeros(max(sizes), dtype=torch.uint8)
        self._decoder = msgspec.msgpack.Decoder(FromPuller)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = _LINGER_MS
        self._socket.maxmsgsize = _MESSAGE_BYTES
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.secret
        name = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{name}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes), "a bound socket has one"
        self.port = int(endpoint.rstrip(b"\x00").rpartition(b":")[2])
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv peer server", daemon=True)
        self._thread.start()

    # The thread of steps

    def offer(self, lease: str, request_id: str, blocks: Mapping[BlockKey, int]) -> bool:
        """Keep blocks for whoever names this lease; `take_ended` tells when it has ended. False:
        they are not kept, because those of others are as many as may be.
        """
        with self._lock:
            if not self._has_room(blocks):
                self.num_refused += 1
                return False
            # a router may name two requests alike: the later one counts
            self._drop(lease)
            now = self._clock()
            self._leases[lease] = _Lease(
                request_id, blocks, now + self._lease_s, now + self._limits.longest_s
            )
            self._uses.update(blocks.values())
            return True

    def _has_room(self, blocks: Mapping[BlockKey, int]) -> bool:
        """Whether one more lease is within the limits; a lone one always is."""
        if not self._leases:
            return True
        new = sum(block not in self._uses for block in blocks.values())
        has_blocks = len(self._uses) + new <= self._limits.most_blocks
        return has_blocks and len(self._leases) < self._limits.most_leases

    def _drop(self, name: str) -> bool:
        """End a lease; under the lock. False: there is none."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return False
        self._ended.append(lease.request_id)
        self._uses.subtract(lease.blocks.values())
        for block in lease.blocks.values():
            if not self._uses[block]:
                # the number of entries is that of blocks under leases
                del self._uses[block]
        self._has_news.set()
        return True

    def withdraw(self, lease: str) -> None:
        """End a lease, if there is one."""
        with self._lock:
            self._drop(lease)

    def take_ended(self) -> list[str]:
        """The requests whose blocks are not read any more, each once."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._has_news.clear()
        return ended

    def wait(self, timeout_s: float) -> None:
        """Wait for a lease to end, at most for `timeout_s`."""
        self._has_news.wait(timeout_s)

    def end_all(self) -> None:
        """End all leases; no block is read when this returns."""
        with self._lock:  # a block is read under the lock
            for name in list(self._leases):
                self._drop(name)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._context.destroy(_LINGER_MS)

    # The thread that answers

    def _run(self) -> None:
        self._root()  # may read the model's files, which a puller does not wait for
        while not self._is_closed:
            try:
                if self._socket.poll(_TURN_MS):
                    self._take(*self._socket.recv_multipart())
                self._end_expired()
            except Exception:
                logger.exception("A message about blocks of K/V was not answered.")

    def _take(self, puller: bytes, *frames: bytes) -> None:
        try:
            (frame,) = frames
            message = self._decoder.decode(frame)
        except (msgspec.DecodeError, ValueError) as error:
            logger.warning("A message that is not about blocks of K/V was dropped: %s", error)
            return
        if isinstance(message, PullHello):
            self._welcome(puller, message)
        # asked each time: weights may have changed since the welcome
        elif (root := self._root()) is None or self._pullers.get(puller) != root:
            if isinstance(message, Read):
                self._send(
                    puller, Gone(NO_READ, "it is another engine, or its weights have changed")
                )
        elif isinstance(message, Read):
            self._answer(puller, message)
        elif isinstance(message, Beat):
            self._renew(message.leases)
        else:
            self.withdraw(message.lease)

    def _welcome(self, puller: bytes, message: PullHello) -> None:
        root, refusal = self._root(), ""
        if message.version != VERSION:
            refusal = f"the version of messages is {VERSION} here and {message.version} there"
        elif root is None:
            refusal = "the weights have changed, and nothing names what they are"
        elif message.root != root:
            refusal = "its K/V depends on other weights, options or code (another root)"
        else:
            self._pullers[puller] = root
            if len(self._pullers) > _MOST_PULLERS:
                self._pullers.popitem(last=False)
        self._send(puller, PullWelcome(self.engine_id, self._sizes, refusal))

    def _answer(self, puller: bytes, message: Read) -> None:
        if len(message.blocks) > MOST_BLOCKS:
            self._send(puller, Gone(message.number, f"a read has at most {MOST_BLOCKS} blocks"))
            return
        for key, group in message.blocks:
            content = self._content(message.lease, (key, group))
            if content is None:
                self._send(puller, Gone(message.number, "the lease has ended or has no such block"))
                return
            block = PulledBlock(message.number, key, group, digest_of(key, group, content))
            self.num_sent_bytes += len(content)
            self._send(puller, block, content)

    def _content(self, name: str, key: BlockKey) -> bytes | None:
        """A block of a lease; None: there is no such lease, or no such block in it."""
        with self._lock:
            lease = self._leases.get(name)
            block = None if lease is None else lease.blocks.get(key)
            if lease is None or block is None:
                return None
            lease.renew(self._clock() + self._lease_s)
            self._read(key[1], block, self._buffer)
            return self._buffer[: self._sizes[key[1]]].numpy().tobytes()

    def _renew(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                if name in self._leases:
                    self._leases[name].renew(self._clock() + self._lease_s)

    def _end_expired(self) -> None:
        now = self._clock()
        with self._lock:
            for name in [name for name, lease in self._leases.items() if lease.ends < now]:
                self.num_expired += self._drop(name)

    def _send(self, puller: bytes, message: Message, *content: bytes) -> None:
        # a puller that takes nothing in finds that its pull makes no progress
        with contextlib.suppress(zmq.Again):
            frames = [puller, to_msgpack(message), *content]
            self._socket.send_multipart(frames, zmq.NOBLOCK)
