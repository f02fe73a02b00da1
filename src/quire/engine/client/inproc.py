"""Step 4 of 8 on a request's path where the core is an object in this process: `get_output` runs a
step in the calling thread.

In: `EngineCoreRequest` from engine/frontend/frontend.py. Out: `EngineCoreOutputs`. Next:
engine/core/core.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

from quire.config.plan import EnginePlan
from quire.engine.client.client import CoreStatus
from quire.engine.client.pending_calls import not_answered
from quire.engine.control_verbs import WorkerVerbs, perform
from quire.engine.core.builder import build_core
from quire.engine.core.core import EngineCore
from quire.engine.core.worker_program import cpus_of_core, of_core
from quire.engine.counterparts import HasCounterparts
from quire.engine.wire.control_calls import BlockingFace, Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.errors import EngineDeadError, InvalidParameter
from quire.hardware.affinity import bound_thread

T = TypeVar("T")


class InprocClient(HasCounterparts, WorkerVerbs, BlockingFace):
    """`EngineCoreClient` without processes: functions may be given to `collective_rpc`."""

    def __init__(self, core: EngineCore) -> None:
        self.engine_core = core
        self._held: deque[EngineCoreOutputs] = deque()
        self._given_up: Future[Any] | None = None
        """A call that still runs, though its caller no longer waits."""
        self._is_closed = False

    @property
    def engine_indices(self) -> Sequence[int]:
        return (0,)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._require_open()
        self._wait_for_given_up()
        if request.data_parallel_rank not in (None, 0):
            rank = request.data_parallel_rank
            raise InvalidParameter("data_parallel_rank", rank, "the cores are 0")
        self.engine_core.add_request(request)

    def abort_requests(self, handles: Sequence[int | str]) -> None:
        if not self._is_closed:
            self._wait_for_given_up()
            self.engine_core.abort_requests(handles)

    def survives(self, handle: int) -> bool:
        return True

    def engine_of(self, handle: int) -> int | None:
        return 0 if handle in self.engine_core.scheduler.requests else None

    def get_output(self) -> EngineCoreOutputs:
        self._require_open()
        self._wait_for_given_up()
        return self._held.popleft() if self._held else self.engine_core.step()

    def call(self, utility: Utility[T]) -> T:
        """A call with `timeout_s` runs in a thread of its own, which nothing can end: after that
        time its caller gets TimeoutError, and whoever uses the core next waits until it is done.
        If a call waits for steps, they run here, and their outputs are kept for `get_output`.
        """
        self._require_open()
        if utility.timeout_s is None:
            self._wait_for_given_up()
            answer = perform(self.engine_core, utility.method, utility.args)
        else:
            answer = self._within(utility.timeout_s, utility)
        if isinstance(answer, Future):
            while not answer.done():
                self._held.append(self.engine_core.step())
            answer = answer.result()
        return cast(T, answer)

    def _call(self, call: Utility[T]) -> T:
        return self.call(call)

    def _within(self, limit_s: float, utility: Utility[Any]) -> Any:
        deadline = time.monotonic() + limit_s
        if not self._wait_for_given_up(limit_s):
            raise not_answered(utility)
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(perform(self.engine_core, utility.method, utility.args))
            except BaseException as error:
                answer.set_exception(error)

        # a daemon: a call that hangs must not keep the program from its exit
        threading.Thread(target=run, name=utility.method, daemon=True).start()
        wait([answer], max(0.0, deadline - time.monotonic()))
        if not answer.done():
            self._given_up = answer
            raise not_answered(utility)
        return answer.result()

    def _wait_for_given_up(self, limit_s: float | None = None) -> bool:
        if self._given_up is not None:
            if wait([self._given_up], limit_s).not_done:
                return False
            self._given_up = None
        return True

    def core_status(self, engine_index: int) -> CoreStatus:
        """Alive until it is shut down: its loop is the caller's."""
        has_work = not self._is_closed and self.engine_core.has_work
        return CoreStatus(engine_index, 0, os.getpid(), not self._is_closed, True, has_work)

    def shutdown(self, timeout: float | None = None) -> None:
        """Requests end now, whatever `timeout`: the core runs only while outputs are asked for."""
        self._is_closed = True
        self.engine_core.shutdown()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("The engine was closed; make a new one.")


def build_client(plan: EnginePlan) -> InprocClient:
    """Build an engine core in this process, ready to serve; only its own threads are bound."""
    plan = of_core(plan, 0)
    with bound_thread(cpus_of_core(plan)):
        return InprocClient(build_core(plan))
