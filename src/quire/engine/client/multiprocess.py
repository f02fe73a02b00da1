"""The client of cores in other processes for one event loop, in which it is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from quire.engine.client.remote_cores import TICK_S, MPClient
from quire.engine.client.scaling import scale
from quire.engine.process.core_process import CoreProcess
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs

T = TypeVar("T")


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

    async def scale(self, num_cores: int, drain_timeout_s: float) -> None:
        """Have so many cores; see scaling.py."""
        self._attach()
        await scale(self, num_cores, drain_timeout_s)

    def start_cores(self, engine_indices: Sequence[int]) -> None:
        super().start_cores(engine_indices)
        self._watch_again()

    def retire(self, engine_index: int) -> CoreProcess | None:
        process = super().retire(engine_index)
        self._watch_again()
        return process

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
        if loop is None:
            return
        for fd in self._watched:
            loop.remove_reader(fd)
        sockets = (self._links.from_cores, self._links.to_cores)
        self._watched = [socket.fileno() for socket in sockets]
        if self._handshake is not None:
            self._watched.append(self._handshake.socket.fileno())
        if self.coordinator is not None:
            self._watched += [
                self.coordinator.counts.fileno(), self.coordinator.process.pipe.fileno()
            ]  # fmt: skip
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
