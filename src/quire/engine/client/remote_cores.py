"""Cores in other processes, on this machine or others: sends them requests and calls, takes in
their outputs, notices when one dies or hangs, and starts, restarts and ends them.

Nothing here waits but `wait_until_ready`: the clients of multiprocess.py call `take` when `wakeup`
is readable, and `check_health` now and then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.encodable import NotEncodable
from quire.engine.client.client import CoreStatus
from quire.engine.client.core_health import CHECK_S, LONGEST_TURN_S, SILENT_S, hang_of, status_of
from quire.engine.client.core_sockets import CoreConnection, CoreSockets
from quire.engine.client.load_balancer import LoadBalancer, load_of
from quire.engine.client.lockstep_group import LockstepGroup
from quire.engine.client.pending_calls import not_encodable, request_not_encodable
from quire.engine.process.core_pool import CorePool
from quire.engine.process.socket_folder import remove_socket_folder
from quire.engine.process.step_board import board_path, read_step_board
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    SchedulerStats,
)
from quire.errors import EngineDeadError, EngineError, InvalidParameter
from quire.processes.child_process import GRACE_S
from quire.processes.codec import Frame
from quire.processes.owned_process import OwnedProcess

if TYPE_CHECKING:
    from quire.engine.data_parallel.coordinator_client import DPCoordinator
    from quire.engine.data_parallel.handshake import HandshakeServer

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Kind = EngineCoreRequestType


class RemoteCores:
    """The cores that `sockets` reach; `pool` starts those that run on this machine.

    `wakeup` becomes readable when something has come: a message, or the end of a process.
    """

    next_check_s = CHECK_S

    def __init__(
        self,
        sockets: CoreSockets,
        pool: CorePool,
        *,
        folder: Path | None = None,
        handshake: HandshakeServer | None = None,
        coordinator: DPCoordinator | None = None,
    ) -> None:
        """`folder` has the sockets and the step boards, `handshake` admits cores of other machines,
        `coordinator` is that of a lock-step group. All of them are closed by `shutdown`.
        """
        self.sockets = sockets
        self.pool = pool
        self.coordinator = coordinator
        self.silent_s = SILENT_S
        self.longest_turn_s = LONGEST_TURN_S
        self.leaving: set[int] = set()
        """Cores that finish their requests and get no new ones."""
        self.is_scaling = False
        """Whether their number is changing now (scaling.py)."""
        self.wakeup = selectors.DefaultSelector()
        self._watched: set[Any] = set()
        self._folder = folder
        self._handshake = handshake
        self._owners: dict[int, int] = {}
        """The core of each live request, by the request's handle."""
        self._balancer = LoadBalancer()
        self._group = LockstepGroup(sockets.connections) if pool.is_lock_step else None
        self._checked_at = time.monotonic()
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._resources(), self._owner_pid)
        # cores of other machines are known by number before they join, so that requests may be
        # pinned to them
        for engine_index in () if handshake is None else handshake.missing:
            sockets.add(CoreConnection(engine_index, 1, has_joined=False))
        self._watch()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that the cores belong to, and not one that it has forked."""
        return os.getpid() == self._owner_pid

    def _resources(self) -> contextlib.ExitStack:
        found = contextlib.ExitStack()
        if self._folder is not None:
            found.callback(remove_socket_folder, self._folder)
        for each in (self._handshake, self.sockets, self.coordinator):
            if each is not None:
                found.callback(each.close)
        found.callback(self.pool.end, 0.0)
        found.callback(self.wakeup.close)
        return found

    # requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core that has its handle, or to the one that the balancer chooses.

        Raises EngineDeadError when no core is left, InvalidParameter for an unknown
        `data_parallel_rank` and for a value that cannot be sent to another process.
        """
        self.send_request(request, self.payload_of(request))

    def payload_of(self, request: EngineCoreRequest) -> list[Frame]:
        """A request as sent, without media's sources. Raises InvalidParameter if it cannot be."""
        if request.media is not None and request.media.sources:
            request = msgspec.structs.replace(request, media=request.media.without_sources())
        try:
            return self.sockets.encode(request)
        except NotEncodable as error:
            raise request_not_encodable(self.sockets.encode, request, error) from error

    def send_request(self, request: EngineCoreRequest, payload: list[Frame]) -> None:
        """As `add_request`, where it has become a payload already."""
        self.sockets.send(self.assign(request), _Kind.ADD, payload, request.handle)

    def assign(self, request: EngineCoreRequest) -> int:
        """The core that has the handle, or is chosen for it now. Raises what `add_request` does."""
        engine_index = self._owners.get(request.handle)
        if engine_index is None:
            engine_index = self._owners[request.handle] = self._choose(request)
            self.sockets.connections[engine_index].num_requests += 1
        return engine_index

    def _choose(self, request: EngineCoreRequest) -> int:
        """Choose the only core, the rank that a request is pinned to, or the balancer's choice."""
        pinned = request.data_parallel_rank
        if pinned is None:
            serving = [index for index in self._serving() if index not in self.leaving]
            if len(serving) == 1:
                return serving[0]
            return self._balancer.choose(request, {index: self._load(index) for index in serving})
        if pinned not in self.engine_indices:
            known = ", ".join(map(str, self.engine_indices))
            raise InvalidParameter("data_parallel_rank", pinned, f"the cores are {known}")
        if self.sockets.connections[pinned].is_dead:
            raise EngineDeadError(f"Engine core {pinned} is dead.", engine_index=pinned)
        # prompts that follow without a pin should find its prefix
        self._balancer.note_pinned(request, pinned)
        return pinned

    def _load(self, engine_index: int) -> float:
        connection = self.sockets.connections[engine_index]
        return load_of(connection.num_requests, connection.stats)

    def _release(self, handle: int) -> int | None:
        engine_index = self._owners.pop(handle, None)
        if engine_index in self.sockets.connections:
            self.sockets.connections[engine_index].num_requests -= 1
        return engine_index

    def _forget(self, engine_index: int) -> None:
        """A core has lost its requests and its prefix cache."""
        # the journal sends them again, and then they are assigned anew
        for handle in [h for h, owner in self._owners.items() if owner == engine_index]:
            del self._owners[handle]
        self._balancer.forget(engine_index)

    def abort_requests(self, handles: Sequence[int]) -> None:
        by_core: dict[int, list[int]] = {}
        for handle in handles:
            engine_index = self._release(handle)
            if engine_index is not None:
                by_core.setdefault(engine_index, []).append(handle)
        for engine_index, its in by_core.items():
            if engine_index in self.sockets.connections:
                self.sockets.send(engine_index, _Kind.ABORT, self.sockets.encode(its))

    def engine_of(self, handle: int) -> int | None:
        """The core that has the request; a dead core has it until it is restarted."""
        return self._owners.get(handle)

    @property
    def has_requests(self) -> bool:
        return bool(self._owners)

    def _serving(self) -> list[int]:
        """The live cores that may get requests and calls. Raises EngineDeadError without any."""
        live = self.sockets.live
        serving = [each.engine_index for each in live if each.is_admitted and each.has_joined]
        if not serving:
            raise EngineDeadError("No engine core is left.")
        return serving

    # outputs and calls

    def next_output(self) -> EngineCoreOutputs | None:
        """Return the next outputs that have arrived. Raises the error of a core that has died."""
        if not self.sockets.events:
            return None
        event = self.sockets.events.popleft()
        if isinstance(event, EngineError):
            raise event
        for end in event.finished:
            self._release(end.handle)
        if event.stats is not None:
            self._note_stats(event.engine_index, event.stats)
        return event

    def _note_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        connection = self.sockets.connections.get(engine_index)
        if connection is not None:
            connection.stats = stats

    def begin_call(self, utility: Utility[T]) -> Future[T]:
        """Call all cores; the future gets their one answer, or EngineDeadError when one dies."""
        try:
            return self.sockets.begin_call(utility, self._serving())
        except NotEncodable as error:
            raise not_encodable(utility, error) from error

    @property
    def is_idle(self) -> bool:
        """Whether no live core has anything to do, though requests may be held by a pause."""
        return all(connection.is_idle for connection in self.sockets.live)

    # cores

    @property
    def engine_indices(self) -> Sequence[int]:
        """The cores that serve; one that is being added is not among them."""
        return [index for index, each in self.sockets.connections.items() if each.is_admitted]

    def core_status(self, engine_index: int) -> CoreStatus:
        return status_of(self.sockets.connections[engine_index])

    def start_core(self, engine_index: int, *, is_admitted: bool = True) -> None:
        """Start the next incarnation of a core. `wait_until_ready` waits for it."""
        process = self.pool.start(engine_index)
        incarnation = self.pool.incarnations[engine_index]
        self.sockets.add(
            CoreConnection(engine_index, incarnation, process, is_admitted=is_admitted)
        )
        self._watch()

    def restart_core(self, engine_index: int, first: Sequence[Utility[Any]] = ()) -> None:
        """Start a dead core again, or wait until it comes back from its machine. What is sent to it
        meanwhile waits until it is ready; it performs `first` before anything else.
        """
        self._forget(engine_index)
        dead = self.sockets.connections[engine_index]
        if dead.process is not None:
            self.start_core(engine_index)
        elif self._handshake is not None:
            self.sockets.add(CoreConnection(engine_index, dead.incarnation + 1, has_joined=False))
        else:
            text = f"Engine core {engine_index} is not ours to restart."
            raise EngineDeadError(text, engine_index=engine_index)
        for utility in first:
            future = self.sockets.begin_call(utility, [engine_index])
            future.add_done_callback(partial(_log_failure, utility.method))

    def dying_step(self, engine_index: int) -> Collection[int] | None:
        """The requests of the steps that a dead core was running; None if that is unknown."""
        process = self.sockets.connections[engine_index].process
        if self._folder is None or (process is not None and not process.is_here):
            return None
        incarnation = self.sockets.connections[engine_index].incarnation
        path = board_path(self._folder, engine_index, incarnation)
        handles = read_step_board(path)
        # each incarnation has a board of its own, and a machine may see many of them
        path.unlink(missing_ok=True)
        return handles

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the cores; requests have `timeout_s` to finish. No process or socket is left."""
        if self._is_closed or not self.is_ours:
            return
        self._is_closed = True
        drain_s = timeout_s or 0.0
        for connection in self.sockets.connections.values():
            self._tell_to_end(connection, drain_s)
        self.pool.end(drain_s + GRACE_S)
        self._finalizer()

    def _tell_to_end(self, connection: CoreConnection, drain_s: float) -> None:
        if connection.ready is not None:
            payload = self.sockets.encode(drain_s)
            self.sockets.send(connection.engine_index, _Kind.SHUTDOWN, payload)
        elif connection.process is not None:
            # it reads no messages before it is ready
            connection.process.kill()  # it is still loading

    # adding and removing cores (scaling.py)

    def require_scalable(self) -> None:
        """Raises EngineError where the number of cores is fixed."""
        if self._group is not None:
            raise EngineError("The number of cores that share experts is fixed: make a new engine.")

    def start_new(self, engine_indices: Sequence[int]) -> None:
        self.pool.resize(len(self.sockets.connections) + len(engine_indices))
        for engine_index in engine_indices:
            self.start_core(engine_index, is_admitted=False)

    def is_ready(self, engine_index: int) -> bool:
        """Whether a new core has reported READY. Raises what kept it from starting."""
        connection = self.sockets.connections[engine_index]
        if connection.error is not None:
            raise connection.error
        return connection.ready is not None

    def admit(self, engine_indices: Sequence[int]) -> None:
        for engine_index in engine_indices:
            self.sockets.connections[engine_index].is_admitted = True

    def num_requests(self, engine_index: int) -> int:
        return self.sockets.connections[engine_index].num_requests

    def retire(self, engine_index: int) -> OwnedProcess | None:
        """Shut a core down and forget it; the caller waits for its process, if there is one."""
        connection = self.sockets.connections.get(engine_index)
        if connection is not None:
            self._tell_to_end(connection, 0.0)
            del self.sockets.connections[engine_index]
        if self._handshake is not None and engine_index in self._handshake.missing:
            self._handshake.missing.remove(engine_index)
        self._forget(engine_index)
        self._watch()
        self.pool.release_memory(engine_index)
        return self.pool.processes.pop(engine_index, None)

    # what comes

    def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Block until every core is ready. Raises the error that kept one from it, TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.sockets.are_ready:
            if time.monotonic() > deadline:
                raise TimeoutError(f"An engine core was not ready within {timeout_s:g} s.")
            self.wakeup.select(CHECK_S)
            self.take()
            for event in self.sockets.events:
                if isinstance(event, EngineError):
                    raise event

    def is_dead(self, engine_index: int) -> bool:
        return self.sockets.connections[engine_index].is_dead

    def take(self) -> None:
        """Take in what has arrived, deaths last: what a core sent before its death counts."""
        if self._is_closed:
            return
        self.sockets.take()
        if self._handshake is not None:
            self._handshake.take(self._join)
        if self.coordinator is not None:
            self._take_from(self.coordinator)
        for connection in self.sockets.live:
            is_remote = connection.process is None
            if why := connection.lost or (connection.reported_error if is_remote else ""):
                self._kill(connection, why)
        for key, _ in self.wakeup.select(0):
            if key.data is not None:  # the pipe of a core's process
                self._check_process(key.data)
        self._watch()

    def _take_from(self, coordinator: DPCoordinator) -> None:
        try:
            coordinator.take(self._note_stats)
        except EngineDeadError as error:  # without it the cores cannot begin a wave
            for connection in self.sockets.live:
                self.sockets.mark_dead(connection, error)

    def _join(self, engine_indices: Sequence[int]) -> list[int] | None:
        """Let cores of another machine join that are waited for, at first or since the restart
        after their death; their incarnations, or None while one of them is not.
        """
        connections = self.sockets.connections
        if any(connections[i].is_dead or connections[i].has_joined for i in engine_indices):
            return None
        for engine_index in engine_indices:
            connections[engine_index].has_joined = True
            connections[engine_index].last_sign = time.monotonic()
        return [connections[index].incarnation for index in engine_indices]

    def _watch(self) -> None:
        """Have `wakeup` watch the sockets, and the pipes of the processes of live cores."""
        wanted: dict[Any, CoreConnection | None] = {
            self.sockets.from_cores: None,
            self.sockets.to_cores: None,
        }
        if self._handshake is not None:
            wanted[self._handshake.socket] = None
        if self.coordinator is not None:
            wanted[self.coordinator.counts] = wanted[self.coordinator.process.pipe] = None
        for connection in self.sockets.live:
            if connection.process is not None:
                wanted[connection.process.pipe] = connection
        for source in self._watched - wanted.keys():
            self.wakeup.unregister(source)
        for source in wanted.keys() - self._watched:
            self.wakeup.register(source, selectors.EVENT_READ, wanted[source])
        self._watched = set(wanted)

    # deaths

    def check_health(self) -> None:
        """Kill cores that hang, and keep spare processes ready; to call every `next_check_s`."""
        now = time.monotonic()
        passed_s, self._checked_at = now - self._checked_at, now
        if passed_s > 2 * CHECK_S:
            # all cores look silent then; the next look is fair again
            return  # this process itself was stopped
        if self.sockets.are_ready:
            self.pool.keep_spares()
        for connection in self.sockets.live:
            self._check_process(connection)
            connection.check_delivery(passed_s)
            if why := hang_of(connection, now, self.silent_s, self.longest_turn_s):
                self._kill(connection, why)

    def _check_process(self, connection: CoreConnection) -> None:
        """Report the core's death if its process has ended and that is not known yet."""
        process = connection.process
        if not connection.is_dead and process is not None and not process.is_running:
            self._on_core_death(connection)

    def _kill(self, connection: CoreConnection, why: str) -> None:
        """Kill a core; one on another machine, which cannot be killed from here, counts as dead."""
        if connection.process is not None:
            connection.kill_reason = why
            connection.process.kill()
        else:
            engine_index = connection.engine_index
            text = f"Engine core {engine_index} is gone: {why}."
            self._mark_dead(connection, EngineDeadError(text, engine_index=engine_index))

    def _on_core_death(self, connection: CoreConnection) -> None:
        """The process of a core has ended: report it, and end the cores of its lock-step group."""
        # its last messages may still be in the socket: tokens in them were emitted, and are not to
        # be computed again
        self.sockets.take()
        engine_index = connection.engine_index
        why = connection.kill_reason or connection.reported_error
        self._mark_dead(connection, self.pool.death_of(engine_index, why))

    def _mark_dead(self, connection: CoreConnection, error: EngineError) -> None:
        if self._group is None or not isinstance(error, EngineDeadError):
            self.sockets.mark_dead(connection, error)
            return
        error.ended_with_group = self._group.was_ended_by_peer(connection)
        self.sockets.mark_dead(connection, error)
        # the others wait in an exchange that never ends
        for peer in self._group.peers_of(connection):
            index = connection.engine_index
            self._kill(peer, f"core {index}, with which it steps in lock-step, has ended")


def _close(resources: contextlib.ExitStack, owner_pid: int) -> None:
    """Close the resources, unless this is a fork of the process that has them."""
    if os.getpid() == owner_pid:
        resources.close()


def _log_failure(method: str, future: Future[Any]) -> None:
    if future.exception() is not None:
        logger.error("A restarted core could not %s: %s", method, future.exception())
