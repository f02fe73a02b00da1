"""Step 4 of 8 on a request's path where the core is an object in this process: `get_output` runs a
step in the calling thread.

In: `EngineCoreRequest` from engine/frontend/frontend.py. Out: `EngineCoreOutputs`. Next:
engine/core/core.py.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar, cast

from quire.engine.client.client import CoreStatus
from quire.engine.control_verbs import perform
from quire.engine.core.core import EngineCore
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest

T = TypeVar("T")


class InprocClient:
    """`EngineCoreClient` without processes: functions may be given to `collective_rpc`."""

    def __init__(self, core: EngineCore) -> None:
        self.engine_core = core
        self._held: deque[EngineCoreOutputs] = deque()

    @property
    def engine_indices(self) -> Sequence[int]:
        return (0,)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(request)

    def abort_requests(self, handles: Sequence[int]) -> None:
        self.engine_core.abort_requests(handles)

    def engine_of(self, handle: int) -> int | None:
        return 0 if handle in self.engine_core.scheduler.requests else None

    def get_output(self) -> EngineCoreOutputs:
        return self._held.popleft() if self._held else self.engine_core.step()

    def call(self, utility: Utility[T]) -> T:
        """`timeout_s` cannot end a call in this process; it returns when it is done. If it waits
        for steps, they run here, and their outputs are kept for `get_output`.
        """
        answer = perform(self.engine_core, utility.method, utility.args)
        if isinstance(answer, Future):
            while not answer.done():
                self._held.append(self.engine_core.step())
            answer = answer.result()
        return cast(T, answer)

    def core_status(self, engine_index: int) -> CoreStatus:
        """Always alive: its loop is the caller's."""
        has_work = self.engine_core.has_work
        return CoreStatus(engine_index, 0, os.getpid(), True, True, has_work)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """`timeout_s`: a core in this process runs only while its outputs are asked for, so its
        requests end now.
        """
        self.engine_core.shutdown()
