"""A core without a process for an event loop: any blocking client, stepped inside the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire.engine.client.client import CoreStatus, EngineCoreClient
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.errors import InvalidParameter

T = TypeVar("T")


class LoopClient:
    """`AsyncEngineCoreClient` over `inner`: a step blocks the loop, so it is for tests and for
    looking at a front end alone.

    `has_work` says whether a step would bring something; when it does not, `get_output` waits for
    the next request or call.
    """

    def __init__(self, inner: EngineCoreClient, has_work: Callable[[], bool]) -> None:
        self.inner = inner
        self._has_work = has_work
        self._news = asyncio.Event()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.inner.add_request(request)
        self._news.set()

    def abort_requests(self, handles: Sequence[int | str]) -> None:
        self.inner.abort_requests(handles)
        self._news.set()

    async def get_output(self) -> EngineCoreOutputs:
        while True:
            await asyncio.sleep(0)
            if self._has_work():
                outputs = self.inner.get_output()
                if outputs.handles or outputs.finished:
                    return outputs
            else:
                self._news.clear()
                await self._news.wait()

    def wait_output(self, limit_s: float) -> EngineCoreOutputs | None:
        if self._has_work():
            return self.inner.get_output()
        time.sleep(min(limit_s, 0.01))  # nothing comes unless somebody else adds it
        return None

    async def call(self, utility: Utility[T]) -> T:
        answer = self.inner.call(utility)
        self._news.set()
        return answer

    async def scale(self, num_cores: int, drain_timeout_s: float) -> None:
        """Refused: there is one core, in this process."""
        hint = "Run the cores in processes."
        raise InvalidParameter("new_data_parallel_size", num_cores, "it must be 1 here", hint)

    def survives(self, handle: int) -> bool:
        return True

    def engine_of(self, handle: int) -> int | None:
        return self.inner.engine_of(handle)

    @property
    def engine_indices(self) -> Sequence[int]:
        return self.inner.engine_indices

    def core_status(self, engine_index: int) -> CoreStatus:
        return self.inner.core_status(engine_index)

    def shutdown(self, timeout_s: float | None = None) -> None:
        self.inner.shutdown(timeout_s)
