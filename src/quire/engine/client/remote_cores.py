"""What the clients of cores in other processes share; how they wait is theirs: a thread blocks in
multiprocess_sync.py, an event loop is given back in multiprocess.py.

With several cores a balancer says which of them
gets a request (load_balancer.py).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq

from quire.engine.client.client import CoreStatus
from quire.engine.client.connections import CoreLinks, is_stopped
from quire.engine.client.load_balancer import LoadBalancer
from quire.engine.client.lockstep_group import CoreGroup
from quire.engine.data_parallel.coordinator_client import DPCoordinator
from quire.engine.data_parallel.handshake import HANDSHAKE_TIMEOUT_MINS, HandshakeServer
from quire.engine.process.core_pool import CoreHost
from quire.engine.process.core_process import GRACE_S, CoreProcess
from quire.engine.process.socket_folder import remove_socket_folder
from quire.engine.process.step_board import board_path, read_step_board
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from quire.errors import EngineDeadError, EngineError, InvalidParameter

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Kind = EngineCoreRequestType

TICK_S = 0.5
SILENT_S = 10.0
"""A core that gave no sign of life for so long is killed."""
LONGEST_TURN_S = 300.0
"""A core whose loop is inside one turn for so long is killed, even if it gives signs of life."""
STOPPED_S = 1.2
"""So soon, if the system says that the process is stopped: it would have beaten twice."""


class MPClient:
    """What both clients share: sending, the state of the cores, their deaths and restarts."""

    def __init__(
        self,
        links: CoreLinks,
        host: CoreHost | None,
        *,
        folder: Path | None = None,
        balancer: LoadBalancer | None = None,
        silent_s: float = SILENT_S,
        longest_turn_s: float = LONGEST_TURN_S,
        handshake: HandshakeServer | None = None,
        coordinator: DPCoordinator | None = None,
    ) -> None:
        """`host` has the processes of the cores that are ours, `folder` the sockets; those on other
        machines come to `handshake`. `coordinator` is that of cores that step together. All end
        with this client.
        """
        self._links = links
        self._host = host
        self._balancer = balancer or LoadBalancer()
        self._folder = folder
        self._silent_s = silent_s
        self.longest_turn_s = longest_turn_s
        self._owners: dict[int, int] = {}
        self._killed: dict[int, str] = {}
        self._new: dict[int, EngineError | None] = {}
        self._leaving: set[int] = set()
        self._checked_at = time.monotonic()
        self._is_closed = False
        self._handshake = handshake
        self.coordinator = coordinator
        self._group = None if host is None or not host.is_lock_step else CoreGroup(links, host)
        self._absent = set(() if handshake is None else handshake.missing)
        for engine_index in self._absent:
            links.expect(engine_index, 1)
        self._finalizer = weakref.finalize(
            self, _let_go, links, host, folder, handshake, coordinator
        )

    # requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core that has its handle, or to the one that the balancer chooses.

        Raises EngineDeadError when no core is left, InvalidParameter for a `data_parallel_rank`
        that is none.
        """
        self._links.send(self.assign(request), _Kind.ADD, request)

    def assign(self, request: EngineCoreRequest) -> int:
        """The core that has the request's handle or, from now on, the one that the balancer
        chooses. Raises what `add_request` does.
        """
        engine_index = self._owners.get(request.handle)
        if engine_index is None:
            engine_index = self._owners[request.handle] = self._choose(request)
        return engine_index

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Tell the cores that have these requests to drop them."""
        by_core: dict[int, list[int]] = {}
        for handle in handles:
            engine_index = self._forget(handle)
            if engine_index is not None:
                by_core.setdefault(engine_index, []).append(handle)
        for engine_index, its in by_core.items():
            if engine_index in self._links.links:
                self._links.send(engine_index, _Kind.ABORT, its)

    def engine_of(self, handle: int) -> int | None:
        """The core that has the request; of a dead core, until the request is aborted or added
        anew.
        """
        return self._owners.get(handle)

    def _choose(self, request: EngineCoreRequest) -> int:
        live = [index for index in self._require_live() if index not in self._leaving]
        pinned = request.data_parallel_rank
        if pinned is None:
            return self._balancer.choose(request, live)
        if pinned not in self.engine_indices:
            known = ", ".join(map(str, self.engine_indices))
            raise InvalidParameter("data_parallel_rank", pinned, f"the cores are {known}")
        if pinned not in self._links.live:
            raise EngineDeadError(f"Engine core {pinned} is dead.", engine_index=pinned)
        self._balancer.note(request, pinned)
        return pinned

    def _forget(self, handle: int) -> int | None:
        engine_index = self._owners.pop(handle, None)
        if engine_index is not None:
            self._balancer.release(engine_index)
        return engine_index

    # cores

    @property
    def engine_indices(self) -> Sequence[int]:
        return [index for index in self._links.links if index not in self._new]

    def core_status(self, engine_index: int) -> CoreStatus:
        """What is known of one core now."""
        process = None if self._host is None else self._host.processes.get(engine_index)
        is_running = process is None or process.is_running
        pid = 0 if process is None else process.pid
        return self._links.status(engine_index, is_running=is_running, pid=pid)

    def dying_step(self, engine_index: int) -> Collection[int] | None:
        """The requests of the steps that a dead core was running; None when it cannot be known."""
        if self._folder is None:
            return None
        incarnation = self._links.links[engine_index].incarnation
        path = board_path(self._folder, engine_index, incarnation)
        handles = read_step_board(path)
        path.unlink(missing_ok=True)
        return handles

    def restart_core(self, engine_index: int, first: Sequence[Utility[Any]] = ()) -> None:
        """Start a dead core anew, or wait for it to come again from its machine. What is sent to it
        meanwhile waits until it is ready, `first` before all else.
        """
        self._require_open()
        self._let_lives_go(engine_index)
        if self._is_ours(engine_index):
            self.start_cores([engine_index])
        elif self._handshake is not None:
            self._links.expect(engine_index, self._links.links[engine_index].incarnation + 1)
            self._absent.add(engine_index)
        else:
            text = f"Engine core {engine_index} is not ours to restart."
            raise EngineDeadError(text, engine_index=engine_index)
        for utility in first:
            _, future = self._links.begin_call(utility, [engine_index])
            future.add_done_callback(partial(_note_failure, utility.method))

    def _let_lives_go(self, engine_index: int) -> None:
        """What a core had is lost."""
        for handle in [h for h, owner in self._owners.items() if owner == engine_index]:
            self._forget(handle)
        self._balancer.forget(engine_index)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the cores; requests may finish for `timeout_s`. Idempotent, and leaves no process
        and no socket behind.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._end_cores(list(self._links.links), timeout_s or 0.0)
        self._finalizer()

    def start_cores(self, engine_indices: Sequence[int]) -> None:
        """Begin a life of each of these cores. `wait_until_ready` waits for them."""
        assert self._host is not None, "the cores are somebody else's"
        for engine_index in engine_indices:
            self._host.start(engine_index)
            self._links.expect(engine_index, self._host.incarnations[engine_index])

    # more and fewer cores (scaling.py)

    def require_scalable(self) -> None:
        """Raises EngineError where the number of cores is fixed."""
        if self._group is not None:
            raise EngineError("The number of cores that share experts is fixed: make a new engine.")

    def start_new(self, engine_indices: Sequence[int]) -> None:
        """Begin cores that get nothing until `admit`."""
        if self._host is None:
            raise EngineDeadError("The cores are not ours: start and end them where they run.")
        self._new |= dict.fromkeys(engine_indices)
        self._host.resize(len(self._links.links) + len(engine_indices))
        self.start_cores(engine_indices)

    def is_ready(self, engine_index: int) -> bool:
        """Whether a new core has said READY. Raises what kept it from it."""
        error = self._new.get(engine_index)
        if error is not None:
            raise error
        return self._links.links[engine_index].ready is not None

    def admit(self, engine_indices: Sequence[int]) -> None:
        """New cores get requests from now on."""
        for engine_index in engine_indices:
            del self._new[engine_index]

    def set_leaving(self, engine_indices: Sequence[int]) -> None:
        """These cores, and no others, finish what they have and get no new requests."""
        self._leaving = set(engine_indices)

    def num_requests(self, engine_index: int) -> int:
        """The requests that the core has."""
        return sum(owner == engine_index for owner in self._owners.values())

    def retire(self, engine_index: int) -> CoreProcess | None:
        """Tell a core to end that nobody needs, and forget it; its process, if it has one still."""
        self._new.pop(engine_index, None)
        if engine_index in self._links.links:
            self._tell_to_end(engine_index, 0.0)
            self._links.forget(engine_index)
        self._balancer.forget(engine_index)
        return None if self._host is None else self._host.processes.pop(engine_index, None)

    def _tell_to_end(self, engine_index: int, drain_s: float) -> None:
        process = None if self._host is None else self._host.processes.get(engine_index)
        if self._links.links[engine_index].ready is not None:
            self._links.send(engine_index, _Kind.SHUTDOWN, drain_s)
        elif process is not None:
            process.terminate()

    def _end_cores(self, engine_indices: Sequence[int], drain_s: float) -> None:
        """Tell cores to end, and wait for those that are ours."""
        for engine_index in engine_indices:
            self._tell_to_end(engine_index, drain_s)
        if self._host is not None:
            self._host.end(engine_indices, drain_s + GRACE_S)

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("The engine was closed; make a new one.")

    def _require_live(self) -> list[int]:
        self._require_open()
        hidden = self._absent.union(self._new)
        live = [index for index in self._links.live if index not in hidden]
        if not live:
            raise EngineDeadError("No engine core is left.")
        return live

    # what comes

    def _take(self) -> None:
        """Take in what has come, deaths last: what a core has sent before counts."""
        if self._is_closed:
            return
        self._links.take()
        if self._handshake is not None:
            self._handshake.take(self._join)
        if self.coordinator is not None:
            self._hear_coordinator(self.coordinator)
        for engine_index, link in self._links.links.items():
            why = link.lost or ("" if self._is_ours(engine_index) else link.last_words)
            if why and not link.is_dead and engine_index not in self._killed:
                self._give_up(engine_index, why)
        for engine_index, process in list(self._host.processes.items() if self._host else ()):
            its = self._links.links.get(engine_index)
            if its is not None and not its.is_dead and not process.is_running:
                self._bury(engine_index)

    def _hear_coordinator(self, coordinator: DPCoordinator) -> None:
        try:
            if coordinator.take(self._balancer.note_stats):
                self._watch_again()
        except EngineDeadError as error:  # no wave begins any more
            for engine_index in self._links.live:
                self._links.lose(engine_index, error)

    def _watch_again(self) -> None:
        """Another process is to be watched; who polls anew each time need not be told."""

    def _join(self, engine_indices: Sequence[int]) -> list[int] | None:
        """Expect cores that come from another machine, for the first time or after their death."""
        links = self._links.links
        if any(not links[i].is_dead and i not in self._absent for i in engine_indices):
            return None
        for engine_index in engine_indices:
            if links[engine_index].is_dead:
                self._let_lives_go(engine_index)
                self._links.expect(engine_index, links[engine_index].incarnation + 1)
            self._absent.discard(engine_index)
        return [links[index].incarnation for index in engine_indices]

    def _is_ours(self, engine_index: int) -> bool:
        """Whether the core's processes are children of this one."""
        return self._host is not None and engine_index in self._host.incarnations

    def _bury(self, engine_index: int) -> None:
        assert self._host is not None
        self._links.take()
        why = self._killed.pop(engine_index, "") or self._links.links[engine_index].last_words
        error = self._host.death_of(engine_index, why)
        if self._group is not None and isinstance(error, EngineDeadError):
            error.fell_with_group = self._group.fell(engine_index)
            for other in self._group.rest_of(engine_index):
                self._give_up(other, self._group.why(engine_index))
        if engine_index in self._new:  # whoever waits for it hears of it, nobody else
            self._new[engine_index] = error
            self._links.forget(engine_index)
        else:
            self._links.lose(engine_index, error)

    def _check_vitals(self) -> None:
        """Kill cores of ours that give no sign of life: then they are dead in the ordinary way."""
        now = time.monotonic()
        passed_s, self._checked_at = now - self._checked_at, now
        if passed_s > 2 * TICK_S:
            return  # it was this process that stood still
        self._links.look(passed_s)
        if self._host is not None and self._links.are_ready:
            self._host.keep_spares()
        for engine_index, link in self._links.links.items():
            if engine_index in self._absent and now - link.since > HANDSHAKE_TIMEOUT_MINS * 60:
                self._give_up(engine_index, "it did not come back from its machine")
            if link.ready is None or link.is_dead:
                continue
            silent_s = now - link.last_sign
            if silent_s > self._silent_s or (
                silent_s > STOPPED_S and self._is_ours(engine_index) and is_stopped(link.ready.pid)
            ):
                self._give_up(engine_index, f"it gave no sign of life for {silent_s:.1f} s")
            elif link.beat.turn_age_s > self.longest_turn_s:
                age_s = link.beat.turn_age_s
                self._give_up(engine_index, f"one turn of its loop took {age_s:.1f} s")

    def _give_up(self, engine_index: int, why: str) -> None:
        process = None if self._host is None else self._host.processes.get(engine_index)
        if process is None:
            text = f"Engine core {engine_index} is gone: {why}."
            self._links.lose(engine_index, EngineDeadError(text, engine_index=engine_index))
            return
        self._killed[engine_index] = why
        process.kill()

    def _next_event(self) -> EngineCoreOutputs:
        event = self._links.events.popleft()
        if isinstance(event, EngineError):
            raise event
        for end in event.finished:
            self._forget(end.handle)
        if event.stats is not None:
            self._balancer.note_stats(event.engine_index, event.stats)
        return event

    def _begin(self, utility: Utility[T]) -> tuple[int, Future[T]]:
        live = self._require_live()
        try:
            return self._links.begin_call(utility, live)
        except TypeError as error:
            hint = "Functions reach only a core in the caller's own process."
            raise InvalidParameter(utility.method, utility.args, str(error), hint) from error

    def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Block until every core is ready. Raises the error that kept one from it, TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self._links.are_ready:
            if time.monotonic() > deadline:
                raise TimeoutError(f"An engine core was not ready within {timeout_s:g} s.")
            self._wait(TICK_S)
            self._raise_deaths()

    def _raise_deaths(self) -> None:
        for event in self._links.events:
            if isinstance(event, EngineError):
                self._links.events.remove(event)
                raise event

    def _wait(self, timeout_s: float) -> None:
        """Block until something has come, or has not for `timeout_s`."""
        poller = zmq.Poller()
        poller.register(self._links.from_cores, zmq.POLLIN)
        poller.register(self._links.to_cores, zmq.POLLIN)
        if self._handshake is not None:
            poller.register(self._handshake.socket, zmq.POLLIN)
        if self.coordinator is not None:
            poller.register(self.coordinator.counts, zmq.POLLIN)
            poller.register(self.coordinator.process.pipe, zmq.POLLIN)
        for engine_index, process in self._host.processes.items() if self._host else ():
            link = self._links.links.get(engine_index)
            if link is not None and not link.is_dead:
                poller.register(process.pipe, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))
        self._take()


def _note_failure(method: str, future: Future[Any]) -> None:
    if future.exception() is not None:
        logger.error("A new life of a core could not %s: %s", method, future.exception())


def _let_go(
    links: CoreLinks,
    host: CoreHost | None,
    folder: Path | None,
    handshake: HandshakeServer | None,
    coordinator: DPCoordinator | None,
) -> None:
    """End what is left of a client that is gone."""
    if host is not None:
        host.end(list(host.processes), 0.0)
    if coordinator is not None:
        coordinator.close()
    links.close()
    if handshake is not None:
        handshake.close()
    if folder is not None:
        remove_socket_folder(folder)
