"""Step 4 of 8 on a request's path where cores are processes: their client, with its two ways to
wait, a thread that blocks and an event loop that is woken.

In: `EngineCoreRequest` from engine/frontend/frontend.py. Out: `EngineCoreOutputs`. Next:
remote_cores.py chooses the core, engine/process/core_server.py hands the request to
engine/core/core.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import TypeVar

from quire.engine.client.client import CoreStatus
from quire.engine.client.handed_over import HandedOver
from quire.engine.client.kept_media import KeptMedia
from quire.engine.client.pending_calls import answer_to, not_answered
from quire.engine.client.remote_cores import RemoteCores
from quire.engine.client.scaling import scale
from quire.engine.client.supervisor import Supervisor
from quire.engine.control_verbs import WorkerVerbs
from quire.engine.counterparts import HasCounterparts
from quire.engine.wire.control_calls import BlockingFace, Utility
from quire.engine.wire.direct_requests import DirectRequests
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.errors import EngineDeadError, EngineError
from quire.processes.owner_signals import held_back

T = TypeVar("T")


class MPClient(HasCounterparts):
    """The base of both clients: everything that does not wait. `media`: see `Supervisor`.

    With `max_restarts` a supervisor restarts dead cores. Without one (0) a death is raised, and
    `remote.restart_core` starts the core again.
    """

    def __init__(
        self, remote: RemoteCores, max_restarts: int = 0, media: KeptMedia | None = None
    ) -> None:
        self.remote = remote
        self.supervisor = None
        if max_restarts:
            self.supervisor = Supervisor(remote, max_restarts=max_restarts, media=media)
        self._cores: RemoteCores | Supervisor = self.supervisor or remote
        self._direct = DirectRequests()
        self._is_closed = False

    @property
    def num_restarts(self) -> int:
        return 0 if self.supervisor is None else self.supervisor.num_restarts

    def add_request(self, request: EngineCoreRequest) -> None:
        self._require_open()
        if request.handle.__class__ is not int or request.handle < 0:
            request = self._direct.take(request)
        self._cores.add_request(request)

    def abort_requests(self, handles: Sequence[int | str]) -> None:
        own = self._direct.handles_of(handles)
        # a fork of the owner that ends must not end the owner's requests
        if not self._is_closed and self.remote.is_ours:
            self._cores.abort_requests(own)
        self._direct.drop(own)

    def survives(self, handle: int) -> bool:
        return self.supervisor is None or self.supervisor.keeps_media(handle)

    def engine_of(self, handle: int) -> int | None:
        return self._cores.engine_of(handle)

    @property
    def engine_indices(self) -> Sequence[int]:
        return self.remote.engine_indices

    def core_status(self, engine_index: int) -> CoreStatus:
        return self.remote.core_status(engine_index)

    def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Block until every core is ready. Raises the error that kept one from it, TimeoutError."""
        self.remote.wait_until_ready(timeout_s)

    def shutdown(self, timeout: float | None = None) -> None:
        self._is_closed = True
        self.remote.shutdown(timeout)

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("The engine was closed; make a new one.")
        if not self.remote.is_ours:
            raise EngineError(
                "The engine's cores belong to the process that this one was forked from: make a "
                "new engine here."
            )

    def _next_output(self) -> EngineCoreOutputs | None:
        outputs = self._cores.next_output()
        if outputs is not None and self._direct.names:
            self._direct.name(outputs)
        return outputs

    def _wait(self, limit_s: float = math.inf) -> None:
        """Block until something has come, or is due, or `limit_s` is over."""
        self.remote.wakeup.select(min(limit_s, self._cores.next_check_s))

    def _take(self) -> None:
        self._cores.take()
        self.remote.check_health()


class SyncMPClient(MPClient, WorkerVerbs, BlockingFace):
    """`EngineCoreClient` of cores in other processes; for one thread. A signal handler that raises
    in a method other than `call` may lose messages, so offline.py holds Ctrl-C back.
    """

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs. Empty when the cores have no requests of ours, when they are paused,
        and when a core has just died that will be restarted.
        """
        self._require_open()
        self._cores.take()
        outputs = self._next_output()
        while outputs is None and self._cores.has_requests:
            self._wait()
            self._take()
            outputs = self._next_output()
            if outputs is None and self._cores.is_idle:
                break
        return EngineCoreOutputs() if outputs is None else outputs

    def call(self, utility: Utility[T]) -> T:
        self._require_open()
        # a signal handler that raised in here could lose a message
        with held_back():
            future = self._cores.begin_call(utility)
        deadline = time.monotonic() + (math.inf if utility.timeout_s is None else utility.timeout_s)
        while not future.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                future.cancel()
                raise not_answered(utility)
            self._wait(left_s)  # may be interrupted: it takes no message
            with held_back():
                self._take()
        return future.result()

    def _call(self, call: Utility[T]) -> T:
        return self.call(call)


class AsyncMPClient(MPClient):
    """`AsyncEngineCoreClient` of cores in other processes; for one event loop at a time."""

    def __init__(
        self, remote: RemoteCores, max_restarts: int = 0, media: KeptMedia | None = None
    ) -> None:
        super().__init__(remote, max_restarts, media)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.handed_over: HandedOver | None = None
        if self.supervisor is not None:
            self.handed_over = HandedOver(self.supervisor, self._announce)
        self._arrival: asyncio.Future[None] | None = None

    async def get_output(self) -> EngineCoreOutputs:
        """Wait for the next outputs; empty when a core has just died that will be restarted."""
        while True:
            self._require_open()
            loop = self._attach()
            outputs = self._next_output()
            if outputs is not None:
                return outputs
            if self._arrival is None or self._arrival.done():
                self._arrival = loop.create_future()
            await self._arrival

    def wait_output(self, limit_s: float) -> EngineCoreOutputs | None:
        self._require_open()
        outputs = self._next_output()
        if outputs is None:
            self._wait(limit_s)
            self._take()
            outputs = self._next_output()
        return outputs

    async def call(self, utility: Utility[T]) -> T:
        self._require_open()
        self._attach()
        return await answer_to(utility, self._cores.begin_call(utility))

    def abort_requests(self, handles: Sequence[int | str]) -> None:
        if self.handed_over:
            self.handed_over.abort([h for h in handles if isinstance(h, int)])
        super().abort_requests(handles)

    async def scale(self, num_cores: int, drain_timeout_s: float) -> None:
        self._require_open()
        self._attach()
        await scale(self.remote, num_cores, drain_timeout_s)

    async def is_scaling(self) -> bool:
        return self.remote.is_scaling

    def shutdown(self, timeout: float | None = None) -> None:
        self._detach()
        super().shutdown(timeout)
        # who waits for outputs learns that the engine is closed
        self._announce()

    def _attach(self) -> asyncio.AbstractEventLoop:
        """Register with the running loop, to be called when something arrives."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._detach()
            self._loop = loop
            loop.add_reader(self.remote.wakeup.fileno(), self._on_arrival)
            # what has come while no loop listened
            self._check()
        return loop

    def _detach(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.remote.wakeup.fileno())
        self._loop = self._timer = None

    def _on_arrival(self) -> None:
        self._cores.take()
        self._announce()

    def _announce(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _check(self) -> None:
        """Do what is due, until the loop changes."""
        self._on_arrival()
        self.remote.check_health()
        if self._loop is not None:
            self._timer = self._loop.call_later(self._cores.next_check_s, self._check)
