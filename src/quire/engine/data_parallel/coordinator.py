"""The coordinator process of a group of cores: it starts their waves, and publishes their load.

It has no state of its own: cores repeat the request for a wave until it has begun, and report their
load whenever it changes. So it may be killed and restarted at any moment.
"""

from __future__ import annotations

import logging
import socket
import time

import msgspec
import zmq

from quire.encodable import to_msgpack
from quire.engine.wire.messages import (
    PROTOCOL_VERSION,
    Counts,
    EngineCoreOutputs,
    EngineCoreRequestType,
    SchedulerStats,
    StartWave,
)
from quire.processes.child_main import ChildProgram
from quire.processes.cluster_keys import ClusterKeys, close_to_strangers
from quire.processes.codec import core_identity, has_input
from quire.processes.start_message import ORPHANED, ChildStart

logger = logging.getLogger(__name__)

PUBLISH_S = 0.1
"""Interval of publishing counts that have changed; others are every `REPEAT_S`."""
REPEAT_S = 5.0


class CoordinatorMessage(ChildStart, kw_only=True):
    """A coordinator's settings. It binds to `cores_in`, `cores_out` and `counts_out`.

    `listener_fds`: listening sockets of the first two, where cores on other machines connect to
    them; only those can that know the secret of `keys`.
    """

    protocol_version: int = PROTOCOL_VERSION
    cores_in: str
    cores_out: str
    counts_out: str
    num_cores: int
    listener_fds: tuple[int, int] | None = None
    keys: ClusterKeys | None = None


class Waves:
    """Wave of the cores, by their own reports. Pure.

    All cores of a group have the same incarnation; reports of earlier ones are ignored. A wave that
    was requested is started once every core has subscribed.
    """

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self.incarnation = 0
        self.wave = 0
        self.is_running = False
        self._is_asked_for = False
        self._listeners: set[bytes] = set()

    def listens(self, identity: bytes, does: bool) -> None:
        if does:
            self._listeners.add(identity)
        else:
            self._listeners.discard(identity)

    def ask(self, incarnation: int, wave: int) -> None:
        """A core needs this wave, or is in it and misses others."""
        self._meet(incarnation)
        if incarnation == self.incarnation and wave >= self.wave:
            self.wave, self.is_running, self._is_asked_for = wave, True, True

    def complete(self, incarnation: int, wave: int) -> None:
        self._meet(incarnation)
        if incarnation == self.incarnation and wave >= self.wave:
            self.wave, self.is_running, self._is_asked_for = wave + 1, False, False

    def due(self) -> list[bytes]:
        """The cores to send the start of `wave` to; empty until all have subscribed."""
        group = [core_identity(index, self.incarnation) for index in range(self._num_cores)]
        if not self._is_asked_for or not self._listeners.issuperset(group):
            return []
        self._is_asked_for = False
        return group

    def _meet(self, incarnation: int) -> None:
        if incarnation > self.incarnation:
            self.incarnation, self.wave, self.is_running = incarnation, 0, False
            self._is_asked_for = False


class DPCoordinatorProc:
    """The loop of the process; it ends when its front end has exited."""

    def __init__(self, message: CoordinatorMessage, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._context = zmq.Context(io_threads=1)
        fds, keys = message.listener_fds or (None, None), message.keys
        self._from_cores = self._bound(zmq.PULL, message.cores_in, fds[0], keys)
        self._to_cores = self._bound(zmq.XPUB, message.cores_out, fds[1], keys)
        self._to_front_ends = self._bound(zmq.PUB, message.counts_out)
        self._waves = Waves(message.num_cores)
        self._stats: dict[int, SchedulerStats] = {}
        self._has_news = True
        self._published_at = 0.0
        self._outputs = msgspec.msgpack.Decoder(EngineCoreOutputs)

    def run(self) -> int:
        """Serve until the pipe ends; the exit code."""
        poller = zmq.Poller()
        for one in (self._from_cores, self._to_cores, self._pipe):
            poller.register(one, zmq.POLLIN)
        while self._pipe.fileno() not in dict(poller.poll(self._patience_ms())):
            self._take()
            self._start_wave()
            self._publish()
        self._context.destroy(linger=0)
        return ORPHANED

    def _patience_ms(self) -> int:
        limit_s = PUBLISH_S if self._has_news else REPEAT_S
        # one more: rounded down, a wait would end just before it is due, and be one of 0 ms from
        # then on
        return max(0, int(1000 * (self._published_at + limit_s - time.monotonic())) + 1)

    def _take(self) -> None:
        while has_input(self._to_cores):
            frame = self._to_cores.recv(zmq.NOBLOCK)
            self._waves.listens(frame[1:], frame[:1] == b"\x01")
        while has_input(self._from_cores):
            try:
                self._note(self._outputs.decode(self._from_cores.recv(zmq.NOBLOCK)))
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                logger.error("Invalid message from a core: %s", error)

    def _note(self, report: EngineCoreOutputs) -> None:
        if report.stats is not None:
            self._stats[report.engine_index] = report.stats
        if report.wave_complete is not None:
            self._waves.complete(report.incarnation, report.wave_complete)
        if report.start_wave is not None:
            self._waves.ask(report.incarnation, report.start_wave)
        self._has_news = True

    def _start_wave(self) -> None:
        payload = to_msgpack(StartWave(self._waves.wave))
        for identity in self._waves.due():
            kind = EngineCoreRequestType.START_DP_WAVE.value
            self._to_cores.send_multipart([identity, kind, payload])

    def _publish(self) -> None:
        now = time.monotonic()
        if now - self._published_at < (PUBLISH_S if self._has_news else REPEAT_S):
            return
        counts = Counts(self._stats, self._waves.wave, self._waves.is_running)
        self._to_front_ends.send(to_msgpack(counts))
        self._published_at, self._has_news = now, False

    def _bound(
        self, kind: int, endpoint: str, fd: int | None = None, keys: ClusterKeys | None = None
    ) -> zmq.Socket[bytes]:
        found = self._context.socket(kind)
        # no message may be dropped: a lost report would leave a wave without an end
        found.set_hwm(0)
        found.linger = 0
        if kind == zmq.XPUB:
            # each core's subscription is passed on, and its end, which say who listens
            found.xpub_verboser = True
        if fd is not None:
            # a socket that the front end holds: a restarted coordinator has the same port
            found.setsockopt(zmq.USE_FD, fd)
        if keys is not None:
            close_to_strangers(found, keys)
        found.bind(endpoint)
        return found


PROGRAM = ChildProgram(
    CoordinatorMessage,
    lambda _: "DPCoordinator",
    lambda message, pipe: DPCoordinatorProc(message, pipe).run(),
)
