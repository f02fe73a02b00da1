"""The sockets between a front end and its cores, and what is known of each core.

It never waits: whoever holds it (multiprocess.py) waits in the way of a thread or of an event loop,
and calls `take` when something has come.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import zmq

from quire.engine.client.client import CoreStatus
from quire.engine.client.pending_calls import CoreCalls
from quire.engine.data_parallel.cluster_keys import ClusterKeys, close_to_strangers
from quire.engine.wire.codec import BadMessage, Frame, MessageDecoder, MessageEncoder, has_input
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.delivery_monitor import DeliveryMonitor
from quire.engine.wire.frame_order import FrameOrder, LostFrames
from quire.engine.wire.messages import (
    ENGINE_CORE_DEAD,
    PROTOCOL_VERSION,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequestType,
    EngineZmqAddresses,
    Heartbeat,
    UtilityRequest,
    core_header,
    core_identity,
)
from quire.errors import EngineError

logger = logging.getLogger(__name__)

_Kind = EngineCoreRequestType

LAST_WORD_MS = 1000
OVERDUE_S = 5.0
"""So long may a message stay away that a heartbeat knows of. Only time in which the receiver looked
counts: neither a long step of the core nor a pause of this process loses anything."""


@dataclass(slots=True)
class CoreLink:
    """One core as its front end knows it. `waiting` are messages that it gets when it is ready.

    `last_words` is the error that a core told us before it ended; `lost` says that messages
    between us are missing, so that nothing that follows can be trusted.
    """

    engine_index: int
    incarnation: int
    since: float
    ready: EngineCoreReadyResponse | None = None
    is_dead: bool = False
    last_words: str = ""
    lost: str = ""
    num_sent: int = 0
    order: FrameOrder = field(default_factory=FrameOrder)
    traffic: DeliveryMonitor = field(default_factory=lambda: DeliveryMonitor(OVERDUE_S))
    waiting: list[list[Frame]] = field(default_factory=list)
    last_sign: float = 0.0
    last_step: float = 0.0
    beat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def identity(self) -> bytes:
        return core_identity(self.engine_index, self.incarnation)


class CoreLinks:
    """Binds the front end's sockets, sends to cores, and sorts what comes.

    `events` are outputs in the order of their arrival, and the errors of cores that have died.
    Messages of an earlier life of a core are dropped. Not thread-safe.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        client_index: int,
        keys: ClusterKeys | None = None,
    ) -> None:
        """`inputs` and `outputs`: the endpoints at which cores find us. With `keys` only those do
        that know the secret.
        """
        self._keys = keys
        self._context = zmq.Context(io_threads=1)
        self.to_cores = self._bound(zmq.ROUTER, inputs)
        self.from_cores = self._bound(zmq.PULL, outputs)
        self.links: dict[int, CoreLink] = {}
        self.events: deque[EngineCoreOutputs | EngineError] = deque()
        self.calls = CoreCalls()
        self._client_index = client_index
        self._encoder = MessageEncoder()
        self._outputs = MessageDecoder(EngineCoreOutputs)
        self._ready = msgspec.msgpack.Decoder(EngineCoreReadyResponse)

    def expect(self, engine_index: int, incarnation: int) -> None:
        """A core begins a life; until its READY its messages wait here."""
        now = time.monotonic()
        link = CoreLink(engine_index, incarnation, now, last_sign=now, last_step=now)
        self.links[engine_index] = link

    def forget(self, engine_index: int) -> None:
        """A core has gone for good."""
        del self.links[engine_index]

    def lose(self, engine_index: int, error: EngineError) -> None:
        """A core has died: what it still sends is dropped, and what waits for it fails."""
        link = self.links[engine_index]
        if link.is_dead:
            return
        link.is_dead = True
        link.waiting.clear()
        self.events.append(error)
        self.calls.fail(engine_index, error)

    @property
    def addresses(self) -> EngineZmqAddresses:
        """Where cores find these sockets."""
        return EngineZmqAddresses([_endpoint(self.to_cores)], [_endpoint(self.from_cores)])

    @property
    def live(self) -> list[int]:
        """The cores that have not died, those that start included."""
        return [index for index, link in self.links.items() if not link.is_dead]

    @property
    def are_ready(self) -> bool:
        """Whether every core that lives has said READY."""
        return all(link.ready or link.is_dead for link in self.links.values())

    def status(self, engine_index: int, *, is_running: bool, pid: int) -> CoreStatus:
        """What is known of a core now."""
        link, now = self.links[engine_index], time.monotonic()
        return CoreStatus(
            engine_index,
            link.incarnation,
            pid or (0 if link.ready is None else link.ready.pid),
            is_running and not link.is_dead,
            link.ready is not None,
            link.beat.has_work,
            link.beat.num_steps,
            silent_s=now - link.last_sign,
            turn_age_s=link.beat.turn_age_s,
            step_age_s=now - link.last_step,
        )

    # what goes out

    def send(self, engine_index: int, kind: EngineCoreRequestType, message: object) -> None:
        """Send a message to a core, at once or when it is ready; to a dead one, not at all.

        Raises TypeError for a message that cannot travel.
        """
        link = self.links[engine_index]
        payload = self._encoder.encode(message)
        link.num_sent += 1
        frames = [link.identity, core_header(kind, link.num_sent), *payload]
        if link.ready is None:
            link.waiting.append(frames)
        elif not link.is_dead:
            self._send(frames)
        if not self.are_ready:
            self.take_ready()  # sending can swallow the socket's sign that something came

    def begin_call(
        self, utility: Utility[Any], engine_indices: Iterable[int]
    ) -> tuple[int, Future[Any]]:
        """Ask these cores; the future has their one answer. Raises TypeError for an argument that
        cannot travel.
        """
        targets = list(engine_indices)
        call_id, future = self.calls.begin(utility, targets)
        request = UtilityRequest(self._client_index, call_id, utility.method, list(utility.args))
        try:
            for engine_index in targets:
                self.send(engine_index, _Kind.UTILITY, request)
        except BaseException:
            self.calls.forget(call_id)
            raise
        return call_id, future

    def _send(self, frames: list[Frame]) -> None:
        try:
            self.to_cores.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 3)
        except zmq.ZMQError as error:
            # Its process has just ended: its pipe will say so.
            logger.warning("A message could not be sent to a core: %s", error)

    # what comes in

    def take(self) -> None:
        """Take in everything that is here now."""
        self.take_ready()
        while has_input(self.from_cores):
            self._take_outputs(self.from_cores.recv_multipart(zmq.NOBLOCK, copy=False))

    def take_ready(self) -> None:
        """Take in READY messages."""
        while has_input(self.to_cores):
            identity, *rest = self.to_cores.recv_multipart(zmq.NOBLOCK)
            try:
                ready = self._ready.decode(rest[0] if rest else b"")
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                logger.error("A core sent what is no READY: %s", error)
                continue
            self._note_ready(identity, ready)

    def _note_ready(self, identity: bytes, ready: EngineCoreReadyResponse) -> None:
        link = self.links.get(ready.engine_index)
        if link is None or link.is_dead or identity != link.identity:
            logger.warning("Core %d of an earlier life is ready: ignored.", ready.engine_index)
            return
        if ready.protocol_version != PROTOCOL_VERSION:
            text = f"Engine core {ready.engine_index} is of another release ({ready.version})."
            self.lose(ready.engine_index, EngineError(text))
            return
        link.ready = ready
        link.last_sign = link.last_step = time.monotonic()
        waiting, link.waiting = link.waiting, []
        for frames in waiting:
            self._send(frames)

    def _take_outputs(self, frames: list[zmq.Frame]) -> None:
        if frames[0].bytes == ENGINE_CORE_DEAD and len(frames) == 3:
            self._note_last_words(frames[1].bytes, frames[2].bytes)
            return
        try:
            outputs = self._outputs.decode(frames)
        except BadMessage as error:
            logger.error("A core sent what is no message: %s", error)
            return
        link = self.links.get(outputs.engine_index)
        if link is None or link.is_dead or outputs.incarnation != link.incarnation:
            return
        if outputs.protocol_version != PROTOCOL_VERSION or link.ready is None or link.lost:
            return
        link.last_sign = time.monotonic()
        if outputs.sequence and not self._is_next(link, outputs.sequence):
            return
        if outputs.heartbeat is not None:
            self._note_beat(link, outputs.heartbeat)
        elif outputs.utility_output is not None:
            self.calls.answer(link.engine_index, outputs.utility_output)
        else:
            link.last_step = link.last_sign
            self.events.append(outputs)

    def _is_next(self, link: CoreLink, sequence: int) -> bool:
        try:
            return link.order.accept(sequence)
        except LostFrames as error:
            link.lost = f"of its messages to us {error}"
            return False

    def look(self, passed_s: float) -> None:
        """So long have we looked on since the last call: what should have come by now?"""
        for link in self.links.values():
            try:
                link.traffic.look(link.beat, link.order.num_taken, passed_s)
            except LostFrames as error:
                link.lost = f"of its messages to us {error}"

    def _note_beat(self, link: CoreLink, beat: Heartbeat) -> None:
        try:
            link.traffic.note_beat(link.beat, beat, link.num_sent, link.last_sign)
        except LostFrames as error:
            link.lost = f"of our messages to it {error}"
        if beat.num_steps != link.beat.num_steps or not beat.has_work:
            link.last_step = link.last_sign
        link.beat = beat

    def _note_last_words(self, identity: bytes, text: bytes) -> None:
        for link in self.links.values():
            if link.identity == identity:
                link.last_words = text.decode(errors="replace")

    # sockets

    def close(self) -> None:
        """Close the sockets. What was not sent is lost, but for a last word to other machines."""
        self._context.destroy(linger=0 if self._keys is None else LAST_WORD_MS)

    def _bound(self, kind: int, endpoints: Sequence[str]) -> zmq.Socket[bytes]:
        found = self._context.socket(kind)
        found.set_hwm(0)
        found.linger = 0
        if kind == zmq.ROUTER:
            found.router_mandatory = True
        if self._keys is not None:
            close_to_strangers(found, self._keys)
        for endpoint in endpoints:
            found.bind(endpoint)
        return found


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    """Where a bound socket is found: where the system chose the port, with that."""
    return cast(bytes, socket.last_endpoint).rstrip(b"\0").decode()


def is_stopped(pid: int) -> bool:
    """Whether the system says that somebody has stopped the process (Linux)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
