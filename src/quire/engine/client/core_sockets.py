"""The two sockets between a front end and all its cores, and what is known of each core.

Nothing here waits: remote_cores.py calls `take` when a message has arrived.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import zmq

from quire.engine.client.pending_calls import PendingCalls
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.delivery_monitor import DeliveryMonitor
from quire.engine.wire.messages import (
    ENGINE_CORE_DEAD,
    PROTOCOL_VERSION,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequestType,
    EngineZmqAddresses,
    Heartbeat,
    SchedulerStats,
    UtilityRequest,
)
from quire.errors import EngineError
from quire.processes.cluster_keys import ClusterKeys, close_to_strangers
from quire.processes.codec import (
    NO_SUBJECT,
    BadMessage,
    Frame,
    FrameOrder,
    LostFrames,
    MessageDecoder,
    MessageEncoder,
    core_header,
    core_identity,
    has_input,
)
from quire.processes.owned_process import OwnedProcess

logger = logging.getLogger(__name__)

LINGER_MS = 1000
"""Milliseconds that closing waits until the last messages have gone to other machines."""


OVERDUE_S = 5.0
"""Seconds that a message which a heartbeat has counted may take to arrive. Only time in which the
receiver read its input counts, so neither a long step of the core nor a pause of this process loses
any.
"""


@dataclass(slots=True)
class CoreConnection:
    """One incarnation of a core: what is known of it, and the messages between it and us.

    `process`: None where another machine started it; `has_joined`: whether it has come from there.
    `identity`: the routing id of its socket. `num_requests`: its live requests; `stats`: what it
    reported last. `is_admitted`: it may get requests (a core that is being added may not).
    `waiting`: messages to send once it is ready. `error`: why it is dead. `reported_error`: what it
    reported before it ended. `lost`: the messages between us that are missing, so that nothing
    after them can be trusted. `kill_reason`: why we killed it.
    """

    engine_index: int
    incarnation: int
    process: OwnedProcess | None = None
    is_admitted: bool = True
    has_joined: bool = True
    ready: EngineCoreReadyResponse | None = None
    error: EngineError | None = None
    reported_error: str = ""
    lost: str = ""
    kill_reason: str = ""
    num_requests: int = 0
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    num_sent: int = 0
    order: FrameOrder = field(default_factory=FrameOrder)
    delivery: DeliveryMonitor = field(default_factory=lambda: DeliveryMonitor(OVERDUE_S))
    waiting: list[list[Frame]] = field(default_factory=list)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    last_sign: float = field(default_factory=time.monotonic)
    last_step: float = field(default_factory=time.monotonic)
    identity: bytes = b""

    def __post_init__(self) -> None:
        self.identity = core_identity(self.engine_index, self.incarnation)

    @property
    def is_dead(self) -> bool:
        return self.error is not None

    @property
    def is_idle(self) -> bool:
        """Whether, by its last heartbeat, it has no work and nothing is on its way either way."""
        beat = self.heartbeat
        has_taken_all = beat.num_taken == self.num_sent and beat.num_sent == self.order.num_taken
        return has_taken_all and not beat.has_work

    def check_delivery(self, passed_s: float) -> None:
        """We have read our input for `passed_s` more seconds: note what should have come by now."""
        try:
            self.delivery.look(self.heartbeat, self.order.num_taken, passed_s)
        except LostFrames as error:
            self.lost = f"of its messages to us {error}"

    def note_heartbeat(self, beat: Heartbeat) -> None:
        try:
            self.delivery.note_beat(self.heartbeat, beat, self.num_sent, self.last_sign)
        except LostFrames as error:
            self.lost = f"of our messages to it {error}"
        if beat.num_steps != self.heartbeat.num_steps or not beat.has_work:
            self.last_step = self.last_sign
        self.heartbeat = beat


class CoreSockets:
    """The front end's two sockets: it sends to cores, and sorts what comes from them.

    `connections`: the present incarnation of each core; messages of an earlier one are dropped.
    `events`: outputs in the order of their arrival, and the errors of cores that have died. Not
    thread-safe.
    """

    def __init__(self, to_cores: str, from_cores: str, keys: ClusterKeys | None = None) -> None:
        """Endpoints that cores connect to; with `keys`, only those that know the secret can."""
        self._keys = keys
        self._context = zmq.Context(io_threads=1)
        self.to_cores = self._bound(zmq.ROUTER, to_cores)
        self.from_cores = self._bound(zmq.PULL, from_cores)
        self.connections: dict[int, CoreConnection] = {}
        self.events: deque[EngineCoreOutputs | EngineError] = deque()
        self._calls = PendingCalls()
        self._encoder = MessageEncoder()
        self._outputs = MessageDecoder(EngineCoreOutputs)
        self._ready = msgspec.msgpack.Decoder(EngineCoreReadyResponse)

    @property
    def addresses(self) -> EngineZmqAddresses:
        return EngineZmqAddresses(_endpoint(self.to_cores), _endpoint(self.from_cores))

    # cores

    def add(self, connection: CoreConnection) -> None:
        """A core starts; messages to it wait until it is ready."""
        self.connections[connection.engine_index] = connection

    def mark_dead(self, connection: CoreConnection, error: EngineError) -> None:
        """A core has died: what it still sends is dropped, and calls that wait for it fail."""
        if connection.is_dead:
            return
        connection.error = error
        connection.waiting.clear()
        # one that is being added had no requests, and `is_ready` raises its error to whoever adds
        # it
        if connection.is_admitted:
            self.events.append(error)
        self._calls.fail(connection.engine_index, error)

    @property
    def live(self) -> list[CoreConnection]:
        """The cores that have not died, including those that are starting."""
        return [each for each in self.connections.values() if not each.is_dead]

    @property
    def are_ready(self) -> bool:
        return all(each.ready or each.is_dead for each in self.connections.values())

    # sending

    def encode(self, message: object) -> list[Frame]:
        return self._encoder.encode(message, is_strict=True)

    def send(
        self,
        engine_index: int,
        kind: EngineCoreRequestType,
        payload: list[Frame],
        subject: int = NO_SUBJECT,
    ) -> None:
        """Send a message to a core, at once or when it is ready; nothing is sent to a dead one."""
        connection = self.connections[engine_index]
        # counted whether it arrives or not, so that what is lost on the way leaves a gap
        connection.num_sent += 1
        header = core_header(kind.value, connection.num_sent, subject)
        frames = [connection.identity, header, *payload]
        if connection.ready is None:
            connection.waiting.append(frames)
        elif not connection.is_dead:
            self._send(frames)
        if not self.are_ready:
            self.take_ready()  # sending can consume the signal that a READY has come

    def begin_call(self, utility: Utility[Any], engine_indices: Iterable[int]) -> Future[Any]:
        """Call these cores; the future gets their one answer. Raises NotEncodable."""
        targets = list(engine_indices)
        call_id, future = self._calls.begin(utility, targets)
        try:
            payload = self.encode(UtilityRequest.of(call_id, utility))
            for engine_index in targets:
                self.send(engine_index, EngineCoreRequestType.UTILITY, payload, call_id)
        except BaseException:
            future.cancel()
            raise
        return future

    def _send(self, frames: list[Frame]) -> None:
        try:
            self.to_cores.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 3)
        except zmq.ZMQError as error:
            # Its process has just ended; its pipe will report that.
            logger.warning("A message could not be sent to a core: %s", error)

    # receiving

    def take(self) -> None:
        self.take_ready()
        while has_input(self.from_cores):
            self._take_outputs(self.from_cores.recv_multipart(zmq.NOBLOCK, copy=False))

    def take_ready(self) -> None:
        while has_input(self.to_cores):
            identity, *rest = self.to_cores.recv_multipart(zmq.NOBLOCK)
            try:
                ready = self._ready.decode(rest[0] if rest else b"")
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                logger.error("Invalid READY message from a core: %s", error)
                continue
            self._note_ready(identity, ready)

    def _note_ready(self, identity: bytes, ready: EngineCoreReadyResponse) -> None:
        connection = self.connections.get(ready.engine_index)
        if connection is None or connection.is_dead or identity != connection.identity:
            logger.warning("Ignoring READY of an old incarnation of core %d.", ready.engine_index)
            return
        if ready.protocol_version != PROTOCOL_VERSION:
            text = f"Engine core {ready.engine_index} is of another release ({ready.version})."
            self.mark_dead(connection, EngineError(text))
            return
        connection.ready = ready
        connection.last_sign = connection.last_step = time.monotonic()
        waiting, connection.waiting = connection.waiting, []
        for frames in waiting:
            self._send(frames)

    def _take_outputs(self, frames: list[zmq.Frame]) -> None:
        if frames[0].bytes == ENGINE_CORE_DEAD and len(frames) == 3:
            self._note_reported_error(frames[1].bytes, frames[2].bytes)
            return
        try:
            outputs = self._outputs.decode(frames)
        except BadMessage as error:
            logger.error("Invalid message from a core: %s", error)
            return
        connection = self.connections.get(outputs.engine_index)
        if connection is None or connection.is_dead or connection.ready is None or connection.lost:
            return
        if outputs.incarnation != connection.incarnation:
            return
        if outputs.protocol_version != PROTOCOL_VERSION:
            return
        connection.last_sign = time.monotonic()
        if outputs.sequence:
            try:
                if not connection.order.accept(outputs.sequence):
                    return
            except LostFrames as error:
                connection.lost = f"of its messages to us {error}"
                return
        if outputs.heartbeat is not None:
            connection.note_heartbeat(outputs.heartbeat)
        elif outputs.utility_output is not None:
            self._calls.answer(connection.engine_index, outputs.utility_output)
        else:
            connection.last_step = connection.last_sign
            self.events.append(outputs)

    def _note_reported_error(self, identity: bytes, text: bytes) -> None:
        for connection in self.connections.values():
            if connection.identity == identity:
                connection.reported_error = text.decode(errors="replace")

    # sockets

    def close(self) -> None:
        """Close the sockets. What was not sent is lost, except to cores on other machines."""
        self._context.destroy(linger=0 if self._keys is None else LINGER_MS)

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        found = self._context.socket(kind)
        # no mark at which a socket drops messages or blocks its sender
        found.set_hwm(0)
        found.linger = 0
        if kind == zmq.ROUTER:
            # an error instead of silence where the core is not connected
            found.router_mandatory = True
        if self._keys is not None:
            close_to_strangers(found, self._keys)
        found.bind(endpoint)
        return found


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    return cast(bytes, socket.last_endpoint).rstrip(b"\0").decode()
