"""Events of the KV cache on the wire, and the sockets that publish them.

A batch is a msgpack array, an event in it a map with its "type": the form that routers read.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from quire.encodable import plain_text, to_msgpack

logger = logging.getLogger(__name__)

GPU = "GPU"
"""The medium of the pool's blocks, whatever device they are on."""

_NO_MORE = (-1).to_bytes(8, "big", signed=True)
"""The number of the message after the last batch of a replay."""
_LINGER_MS = 1000
_JOIN_S = 5.0


class KVCacheEvent(msgspec.Struct, tag_field="type", tag=True, omit_defaults=True, gc=False):
    """A change of what the cache has."""


class BlockStored(KVCacheEvent, gc=False):
    """Contents can be found from now on, each in a block of `block_size` tokens after the one
    before it, the first of them after `parent_block_hash` (None: at the beginning of prompts).
    `extra_keys`: by block, what stands in its hash besides tokens; None: nothing. Of a tier's
    contents only the hashes are known: they have no tokens, and the block size 0.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent, gc=False):
    """Contents cannot be found there any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent, gc=False):
    """Nothing can be found any more."""


AnyKVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of a step, in order. `ts`: seconds since the epoch."""

    ts: float
    events: list[AnyKVCacheEvent]
    data_parallel_rank: int | None = None


class KeptBatches:
    """Encoded batches by consecutive numbers: those that are to be sent, and the last ones, which
    may be asked for again. Threads share it.
    """

    def __init__(self, first: int, most_queued: int, most_kept: int) -> None:
        self._next = first
        self._queue: deque[tuple[int, bytes]] = deque(maxlen=most_queued)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=most_kept)
        self._lock = threading.Lock()
        self.num_dropped = 0
        """Batches that gave their places in the queue to later ones."""

    def add(self, payload: bytes) -> None:
        """Queue a batch; the oldest one makes room."""
        with self._lock:
            if len(self._queue) == self._queue.maxlen:
                self.num_dropped += 1
            self._queue.append((self._next, payload))
            self._kept.append((self._next, payload))
            self._next += 1

    def take(self) -> tuple[int, bytes] | None:
        """The next batch to send; None: all are sent."""
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """The batches that are kept from this number on."""
        with self._lock:
            return [each for each in self._kept if each[0] >= number]


class EventPublisher:
    """Sends batches in a thread of its own: nobody waits for a subscriber.

    A message is (topic, number, batch), the number as 8 bytes, big-endian. To a request (empty,
    number) at `replay_endpoint` the batches that are kept from there on are the answer, then one
    with the number -1.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        first: int = 0,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
    ) -> None:
        """first: number of the first batch. Raises EndpointTaken."""
        self._topic = plain_text(topic).encode()
        self._batches = KeptBatches(first, max_queue_size, buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = (
            zmq.Context.instance()
        )  # subscribers of inproc:// share it
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(hwm)
        self._replays: zmq.Socket[bytes] | None = None
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._has_warned = False
        try:
            _open("endpoint", endpoint, self._events, is_bound=_is_bound(endpoint))
            if replay_endpoint is not None:
                self._replays = self._context.socket(zmq.ROUTER)
                # A ROUTER drops what exceeds its limit: a whole replay does not.
                self._replays.sndhwm = buffer_steps + 1
                _open("replay_endpoint", replay_endpoint, self._replays, is_bound=True)
        except BaseException:
            self.close()
            raise

    @property
    def num_dropped(self) -> int:
        """Batches that were not sent, because more than `max_queue_size` waited."""
        return self._batches.num_dropped

    def start(self) -> None:
        """Start the thread, which has the sockets from now on."""
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        self._batches.add(to_msgpack(batch))
        if self._batches.num_dropped and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Events of the KV cache come faster than they are sent: the oldest batches are "
                "dropped, and replay_endpoint alone still has them."
            )
        self._signal()

    def close(self) -> None:
        """Send what is queued, and end."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is not None:
            self._signal()
            self._thread.join(_JOIN_S)
        else:
            self._close_sockets()
        self._wake.close()

    def _signal(self) -> None:
        # It fails where the thread has many signals that it has not read, or has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        handlers: dict[Any, Callable[[], None]] = {self._woken.fileno(): self._send_queued}
        if self._replays is not None:
            handlers[self._replays] = self._answer
        poller = zmq.Poller()
        for source in handlers:
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_closed:
                for source, _ in poller.poll():
                    handlers[source]()
            self._send_queued()
        except Exception:
            logger.exception("Events of the KV cache are not published any more.")
        finally:
            self._close_sockets()

    def _send_queued(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while (batch := self._batches.take()) is not None:
            self._events.send_multipart((self._topic, batch[0].to_bytes(8, "big"), batch[1]))

    def _answer(self) -> None:
        assert self._replays is not None, "it was polled"
        frames = self._replays.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.debug("A request for a replay that is not one: %d frames", len(frames))
            return
        to = frames[0], b""
        for number, payload in self._batches.since(int.from_bytes(frames[2], "big")):
            message = (*to, self._topic, number.to_bytes(8, "big"), payload)
            self._replays.send_multipart(message)
        self._replays.send_multipart((*to, b"", _NO_MORE, b""))

    def _close_sockets(self) -> None:
        self._events.close(_LINGER_MS)
        if self._replays is not None:
            self._replays.close(_LINGER_MS)
        self._woken.close()


class EndpointTaken(OSError):
    """An endpoint cannot be opened. `name`: endpoint or replay_endpoint."""

    def __init__(self, name: str, endpoint: str, reason: str) -> None:
        super().__init__(f"{name} {endpoint}: {reason}")
        self.name, self.endpoint, self.reason = name, endpoint, reason


def _is_bound(endpoint: str) -> bool:
    """Whether subscribers connect to it; if not, it is a subscriber's that is connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _open(name: str, endpoint: str, sock: zmq.Socket[bytes], *, is_bound: bool) -> None:
    try:
        if is_bound:
            sock.bind(endpoint)
        else:
            sock.connect(endpoint)
    except zmq.ZMQError as error:
        raise EndpointTaken(name, endpoint, zmq.strerror(error.errno or 0)) from None
