"""A core that shares experts with others: they step together, in waves.

During a wave every core makes one round after the other (distributed/expert_exchange.py): its own
steps if it has work, dummy rounds if it has none. At the beginning of each round the cores exchange
whether they have work left; when none has, the wave ends for all of them at once, and they wait. A
core that then gets work asks the coordinator to start the next wave on every core, and repeats that
until the wave has begun, so that no core waits forever if the coordinator dies.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from quire.encodable import to_msgpack
from quire.engine.core.core import EngineCore
from quire.engine.process.core_server import EngineCoreProc
from quire.engine.process.liveness import PEERS_LOST
from quire.engine.process.start_message import StartMessage
from quire.engine.wire.messages import (
    EngineCoreOutputs,
    EngineCoreRequestType,
    SchedulerStats,
    StartWave,
)
from quire.errors import PeersLost
from quire.processes.codec import has_input

if TYPE_CHECKING:
    from quire.distributed.meeting import Meeting

ASK_AGAIN_S = 0.5

FAREWELL_S = 0.5
"""Seconds that the message to end may take to reach all cores."""


class DPEngineCoreProc(EngineCoreProc):
    """The loop of such a core. Invariant: cores that are not in a wave are before the same one."""

    def __init__(self, core: EngineCore, message: StartMessage, pipe: socket.socket) -> None:
        super().__init__(core, message, pipe)
        addresses = message.addresses
        assert core.lock_step is not None, "a core that steps for itself has no waves"
        assert addresses.coordinator_input and addresses.coordinator_output
        self.store: Meeting | None = None
        """The store at which ranks of all cores meet, where this core hosts it for them."""
        self._lock_step = core.lock_step
        self._lock_step.while_waiting = self._on_waiting
        self._to_coordinator = self._connected(zmq.PUSH, addresses.coordinator_input)
        self._from_coordinator = self._connected(zmq.SUB, addresses.coordinator_output)
        self._from_coordinator.subscribe(self._identity)
        self._poller.register(self._from_coordinator, zmq.POLLIN)
        self._start = msgspec.msgpack.Decoder(StartWave)
        self._wave = 0
        self._is_in_wave = False
        self._asked = (-1, 0.0)
        self._counts = SchedulerStats()

    def _serve(self) -> None:
        try:
            super()._serve()
        except PeersLost:
            if self.core.on_launch is not None:
                self.core.on_launch(())  # none of our requests is to blame
            if not self._is_told_to_end_too():
                raise
            self._end_all()

    def _is_told_to_end_too(self) -> bool:
        """Whether the others have ended because all cores were told to."""
        end = time.monotonic() + FAREWELL_S
        while self._deadline is None and time.monotonic() < end:
            self._poller.poll(int(FAREWELL_S * 1000))
            super()._take_input()
        return self._deadline is not None

    def _exit_code(self, error: Exception) -> int:
        return PEERS_LOST if isinstance(error, PeersLost) else super()._exit_code(error)

    # the loop

    def _has_more_to_do(self) -> bool:
        return self._is_in_wave or self.core.has_work

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        self._lock_step.is_ending = True
        is_all_over = not self._has_more_to_do() and self._lock_step.all_end
        if not is_all_over and time.monotonic() < self._deadline:
            return False
        self._end_all()
        return True

    def _wait_for_input(self) -> None:
        if self._is_in_wave:
            return
        if not self.core.has_work and self._deadline is None:
            self._poller.poll()
            return
        if self._asked[0] != self._wave or time.monotonic() - self._asked[1] > ASK_AGAIN_S:
            self._ask()
        self._poller.poll(int(ASK_AGAIN_S * 1000))

    def _take_input(self) -> None:
        super()._take_input()
        while has_input(self._from_coordinator):
            _, kind, payload = self._from_coordinator.recv_multipart(zmq.NOBLOCK)
            if kind != EngineCoreRequestType.START_DP_WAVE.value:
                continue
            start = self._start.decode(payload)
            # cores ask again and again, so that a start may come after its wave has ended
            if not self._is_in_wave and start.wave >= self._wave:
                self._wave, self._is_in_wave = start.wave, True

    def _turn(self) -> None:
        if not self._is_in_wave:
            return
        num_rounds = self._lock_step.num_rounds
        super()._turn()
        # no step was launched, and the others wait for this core in their round
        if self._lock_step.num_rounds == num_rounds:
            if self.core.execute_dummy_batch():
                self._num_steps += 1
            else:
                self._end_wave()
        self._tell_counts()

    def _end_wave(self) -> None:
        self._wave += 1
        self._is_in_wave = False
        # one report is enough: a wave ends for all cores in the same round
        if self._message.engine_index == 0:
            self._tell(EngineCoreOutputs(wave_complete=self._wave - 1))

    # messages to the coordinator

    def _on_waiting(self) -> None:
        """We wait for the others: their turn is long, or they missed the start of the wave."""
        self._turn_began = time.monotonic()
        self._ask()

    def _ask(self) -> None:
        """Ask for the wave that we need, or are in already, so that the others join."""
        self._asked = self._wave, time.monotonic()
        self._tell(EngineCoreOutputs(start_wave=self._wave))

    def _tell_counts(self) -> None:
        scheduler = self.core.scheduler
        counts = SchedulerStats(
            len(scheduler.running), len(scheduler.waiting), scheduler.memory.pool.usage
        )
        if counts != self._counts:
            self._counts = counts
            self._tell(EngineCoreOutputs(stats=counts))

    def _tell(self, outputs: EngineCoreOutputs) -> None:
        message = self._message
        outputs.engine_index, outputs.incarnation = message.engine_index, message.incarnation
        with contextlib.suppress(zmq.Again):  # what matters is repeated
            self._to_coordinator.send(to_msgpack(outputs), zmq.NOBLOCK)
