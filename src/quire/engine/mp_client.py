"""Clients of cores in other processes: one for a thread that blocks, one for an event loop.

They differ in how they wait and in nothing else. With several cores a balancer says which of them
gets a request (load_balancer.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq

from quire.engine.client import CoreStatus
from quire.engine.core_host import CoreHost
from quire.engine.core_links import CoreLinks, is_stopped
from quire.engine.core_process import GRACE_S
from quire.engine.load_balancer import LoadBalancer
from quire.engine.protocol import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from quire.engine.socket_folder import remove_socket_folder
from quire.engine.step_board import board_path, read_step_board
from quire.engine.utility import Utility
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
    ) -> None:
        """`host` has the processes of the cores (None: somebody else has started them), `folder`
        the sockets. Both end with this client.
        """
        self._links = links
        self._host = host
        self._balancer = balancer or LoadBalancer()
        self._folder = folder
        self._silent_s = silent_s
        self.longest_turn_s = longest_turn_s
        self._owners: dict[int, int] = {}
        self._killed: dict[int, str] = {}
        self._checked_at = time.monotonic()
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _let_go, links, host, folder)

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
        live = self._require_live()
        pinned = request.data_parallel_rank
        if pinned is None:
            return self._balancer.choose(request, live)
        if pinned not in self._links.links:
            known = ", ".join(map(str, self._links.links))
            raise InvalidParameter("data_parallel_rank", pinned, f"the cores are {known}")
        if pinned not in live:
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
        return list(self._links.links)

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
        """Start a dead core anew; what is sent to it meanwhile waits until it is ready, `first`
        before all else.
        """
        self._require_open()
        if self._host is None:
            text = f"Engine core {engine_index} is not ours to restart."
            raise EngineDeadError(text, engine_index=engine_index)
        for handle in [h for h, owner in self._owners.items() if owner == engine_index]:
            self._forget(handle)
        self._balancer.forget(engine_index)
        self.start_cores([engine_index])
        for utility in first:
            _, future = self._links.begin_call(utility, [engine_index])
            future.add_done_callback(partial(_note_failure, utility.method))

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

    def _end_cores(self, engine_indices: Sequence[int], drain_s: float) -> None:
        """Tell cores to end, and wait for those that are ours."""
        for engine_index in engine_indices:
            process = None if self._host is None else self._host.processes.get(engine_index)
            if self._links.links[engine_index].ready is not None:
                self._links.send(engine_index, _Kind.SHUTDOWN, drain_s)
            elif process is not None:
                process.terminate()
        if self._host is not None:
            self._host.end(engine_indices, drain_s + GRACE_S)

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("The engine was closed; make a new one.")

    def _require_live(self) -> list[int]:
        self._require_open()
        live = self._links.live
        if not live:
            raise EngineDeadError("No engine core is left.")
        return live

    # what comes

    def _take(self) -> None:
        """Take in what has come, deaths last: what a core has sent before counts."""
        if self._is_closed:
            return
        self._links.take()
        for engine_index, process in list(self._host.processes.items() if self._host else ()):
            link = self._links.links.get(engine_index)
            if link is not None and not link.is_dead and not process.is_running:
                self._bury(engine_index)

    def _bury(self, engine_index: int) -> None:
        assert self._host is not None
        self._links.take()
        why = self._killed.pop(engine_index, "") or self._links.links[engine_index].last_words
        self._links.lose(engine_index, self._host.death_of(engine_index, why))

    def _check_vitals(self) -> None:
        """Kill cores of ours that give no sign of life: then they are dead in the ordinary way."""
        now = time.monotonic()
        late_s, self._checked_at = now - self._checked_at, now
        if late_s > 2 * TICK_S:
            return  # it was this process that stood still
        for engine_index, link in self._links.links.items():
            if link.ready is None or link.is_dead:
                continue
            silent_s = now - link.last_sign
            if silent_s > self._silent_s or (
                silent_s > STOPPED_S and self._host is not None and is_stopped(link.ready.pid)
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
        for engine_index, process in self._host.processes.items() if self._host else ():
            link = self._links.links.get(engine_index)
            if link is not None and not link.is_dead:
                poller.register(process.pipe, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))
        self._take()


class SyncMPClient(MPClient):
    """`EngineCoreClient` of cores in other processes; for one thread."""

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs. Empty when the cores have no requests of ours, or stand still."""
        self._require_open()
        links = self._links
        links.take()
        if not links.events:
            self._take()
        beats = [link.beat for link in links.links.values()]
        while not links.events and self._owners:
            self._wait(TICK_S)
            self._check_vitals()
            if not links.events and self._stands_still(beats):
                break
        return self._next_event() if links.events else EngineCoreOutputs()

    def call(self, utility: Utility[T]) -> T:
        """Ask every core, and give their one answer."""
        call_id, future = self._begin(utility)
        limit_s = utility.timeout_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not future.done():
            left_s = TICK_S if deadline is None else min(TICK_S, deadline - time.monotonic())
            if left_s <= 0:
                self._links.calls.forget(call_id)
                raise TimeoutError(f"{utility.method} was not answered within {limit_s:g} s.")
            self._wait(left_s)
            self._check_vitals()
        return future.result()

    def _stands_still(self, before: list[Any]) -> bool:
        """Has every core said since `before` that it has nothing to do?"""
        now = [link.beat for link in self._links.links.values() if not link.is_dead]
        return all(beat not in before and not beat.has_work for beat in now)


class AsyncMPClient(MPClient):
    """`AsyncEngineCoreClient` of cores in other processes; for one event loop at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._arrival: asyncio.Future[None] | None = None

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs; waits until there are some."""
        self._attach()
        while not self._links.events:
            self._require_open()
            assert self._loop is not None
            if self._arrival is None or self._arrival.done():
                self._arrival = self._loop.create_future()
            await self._arrival
        return self._next_event()

    async def call(self, utility: Utility[T]) -> T:
        """Ask every core, and give their one answer."""
        self._attach()
        call_id, future = self._begin(utility)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), utility.timeout_s)
        except TimeoutError:
            text = f"{utility.method} was not answered within {utility.timeout_s:g} s."
            raise TimeoutError(text) from None
        finally:
            self._links.calls.forget(call_id)

    def restart_core(self, engine_index: int, first: Sequence[Utility[Any]] = ()) -> None:
        super().restart_core(engine_index, first)
        if self._loop is not None:
            self._watch_again()

    def shutdown(self, timeout_s: float | None = None) -> None:
        self._detach()
        super().shutdown(timeout_s)
        self._announce()

    def _attach(self) -> None:
        """Let the running loop call us when something comes."""
        self._require_open()
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._detach()
        self._loop = loop
        self._watch_again()
        self._tick()

    def _detach(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            for fd in self._watched:
                self._loop.remove_reader(fd)
        self._loop, self._watched, self._timer = None, [], None

    def _watch_again(self) -> None:
        """Watch the sockets and the pipes of the present processes."""
        loop = self._loop
        assert loop is not None
        for fd in self._watched:
            loop.remove_reader(fd)
        sockets = (self._links.from_cores, self._links.to_cores)
        self._watched = [socket.fileno() for socket in sockets]
        if self._host is not None:
            self._watched += [
                process.pipe.fileno()
                for index, process in self._host.processes.items()
                if index in self._links.links and not self._links.links[index].is_dead
            ]
        for fd in self._watched:
            loop.add_reader(fd, self._on_arrival)
        loop.call_soon(self._on_arrival)  # what came before anybody watched gives no sign

    def _on_arrival(self) -> None:
        if self._is_closed or self._loop is None:
            return
        num_live = len(self._links.live)
        self._take()
        if len(self._links.live) != num_live:
            self._watch_again()
        if self._links.events:
            self._announce()

    def _announce(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _tick(self) -> None:
        if self._is_closed or self._loop is None:
            return
        self._on_arrival()
        self._check_vitals()
        self._timer = self._loop.call_later(TICK_S, self._tick)


def _note_failure(method: str, future: Future[Any]) -> None:
    if future.exception() is not None:
        logger.error("A new life of a core could not %s: %s", method, future.exception())


def _let_go(links: CoreLinks, host: CoreHost | None, folder: Path | None) -> None:
    """End what is left of a client that is gone."""
    if host is not None:
        host.end(list(host.processes), 0.0)
    links.close()
    if folder is not None:
        remove_socket_folder(folder)
