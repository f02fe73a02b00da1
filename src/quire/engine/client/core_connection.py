"""One incarnation of a core, as its front end knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from quire.engine.client.client import CoreStatus
from quire.engine.process.core_process import CoreProcess
from quire.engine.wire.codec import Frame, FrameOrder, LostFrames, core_identity
from quire.engine.wire.delivery_monitor import DeliveryMonitor
from quire.engine.wire.messages import EngineCoreReadyResponse, Heartbeat
from quire.errors import EngineError

OVERDUE_S = 5.0
"""How long a message that a heartbeat has counted may stay away. Only time in which the receiver
read its input counts, so neither a long step of the core nor a pause of this process loses any."""


@dataclass(slots=True)
class CoreConnection:
    """What is known of the core, and the messages between it and us.

    `process`: None where it runs on another machine; `has_joined`: whether it has come from there.
    `is_admitted`: it may get requests (a core that is being added may not). `waiting`: messages to
    send once it is ready. `error`: why it is dead. `reported_error`: what it reported before it
    ended. `lost`: the messages between us that are missing, so that nothing after them can be
    trusted. `kill_reason`: why we killed it.
    """

    engine_index: int
    incarnation: int
    process: CoreProcess | None = None
    is_admitted: bool = True
    has_joined: bool = True
    ready: EngineCoreReadyResponse | None = None
    error: EngineError | None = None
    reported_error: str = ""
    lost: str = ""
    kill_reason: str = ""
    num_sent: int = 0
    order: FrameOrder = field(default_factory=FrameOrder)
    delivery: DeliveryMonitor = field(default_factory=lambda: DeliveryMonitor(OVERDUE_S))
    waiting: list[list[Frame]] = field(default_factory=list)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    last_sign: float = field(default_factory=time.monotonic)
    last_step: float = field(default_factory=time.monotonic)

    @property
    def identity(self) -> bytes:
        """The routing id of its socket."""
        return core_identity(self.engine_index, self.incarnation)

    @property
    def is_dead(self) -> bool:
        return self.error is not None

    @property
    def is_idle(self) -> bool:
        """Whether, by its last heartbeat, it has taken all messages and has no work, and all that
        it sent has arrived.
        """
        beat = self.heartbeat
        has_taken_all = beat.num_taken == self.num_sent and beat.num_sent == self.order.num_taken
        return has_taken_all and not beat.has_work

    def status(self) -> CoreStatus:
        """What is known of the core now."""
        now, beat, process = time.monotonic(), self.heartbeat, self.process
        remote_pid = 0 if self.ready is None else self.ready.pid
        return CoreStatus(
            self.engine_index,
            self.incarnation,
            pid=remote_pid if process is None else process.pid,
            is_running=not self.is_dead and (process is None or process.is_running),
            is_started=self.ready is not None,
            has_work=beat.has_work,
            num_steps=beat.num_steps,
            silent_s=now - self.last_sign,
            turn_age_s=beat.turn_age_s,
            step_age_s=now - self.last_step,
        )

    def is_next(self, sequence: int) -> bool:
        """Whether the message with this number is the next one; a gap is noted as a loss."""
        try:
            return self.order.accept(sequence)
        except LostFrames as error:
            self.lost = f"of its messages to us {error}"
            return False

    def check_delivery(self, passed_s: float) -> None:
        """We have read our input for `passed_s` more seconds: note what should have come by now."""
        try:
            self.delivery.look(self.heartbeat, self.order.num_taken, passed_s)
        except LostFrames as error:
            self.lost = f"of its messages to us {error}"

    def note_heartbeat(self, beat: Heartbeat) -> None:
        """Take its latest heartbeat."""
        try:
            self.delivery.note_beat(self.heartbeat, beat, self.num_sent, self.last_sign)
        except LostFrames as error:
            self.lost = f"of our messages to it {error}"
        if beat.num_steps != self.heartbeat.num_steps or not beat.has_work:
            self.last_step = self.last_sign
        self.heartbeat = beat
