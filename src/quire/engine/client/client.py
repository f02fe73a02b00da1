"""The interface of step 4 of 8 on a request's path: how a front end reaches engine cores, wherever
they run.

In: `EngineCoreRequest`, made by engine/frontend/input_processor.py. Out: `EngineCoreOutputs` for
engine/frontend/output_processor.py. Next: engine/core/core.py. A core in this process is called
directly (inproc.py). Core processes are reached through multiprocess.py, which waits for outputs,
remote_cores.py, which chooses the core, and core_sockets.py; engine/process/core_server.py is the
other end of its sockets.

Sending never waits, so it is the same for every client. The two protocols below differ in how they
wait for outputs and answers: `EngineCoreClient` blocks the calling thread, `AsyncEngineCoreClient`
is awaited. Both raise `EngineDeadError`, with the core's `engine_index`, when one has died that is
not restarted (supervisor.py); the client goes on with the other cores.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """The current status of one core.

    `is_running`: its process exists. `is_started`: it has reported READY. `silent_s` is the time
    since its last sign of life, `turn_age_s` how long its loop has been inside one turn,
    `step_age_s` the time since it last completed a step or had no work.
    """

    engine_index: int
    incarnation: int
    pid: int
    is_running: bool
    is_started: bool
    has_work: bool = False
    num_steps: int = 0
    silent_s: float = 0.0
    turn_age_s: float = 0.0
    step_age_s: float = 0.0

    @property
    def is_loading(self) -> bool:
        """Whether no process of the core has been ready so far."""
        return self.incarnation == 1 and not self.is_started

    def is_alive(self, limit_s: float) -> bool:
        """Whether its loop turns: a sign of life within `limit_s`, and no turn longer than that."""
        return self.is_running and max(self.silent_s, self.turn_age_s) <= limit_s

    def status(self, limit_s: float) -> EngineStatusType:
        """Dead without a process, else healthy if it makes progress."""
        if not self.is_running:
            return EngineStatusType.DEAD
        return EngineStatusType.HEALTHY if self.is_ready(limit_s) else EngineStatusType.UNHEALTHY

    def is_ready(self, limit_s: float) -> bool:
        """Whether it has started and, if it has work, completed a step within `limit_s`."""
        is_idle = not self.has_work
        return self.is_started and self.is_alive(limit_s) and (is_idle or self.step_age_s < limit_s)


class EngineStatusType(enum.Enum):
    """The state of a core."""

    HEALTHY = "healthy"
    DEAD = "dead"
    UNHEALTHY = "unhealthy"


class CoreClient(Protocol):
    """The methods that every client has. None of them waits."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; its outputs carry its handle, or the name of one that comes without a
        handle (wire/direct_requests.py). For a live handle: its next input.

        With several cores the client chooses one and stays with it. Raises subclasses of
        RequestError for what cannot be sent; then nothing has changed.
        """
        ...

    def abort_requests(self, handles: Sequence[int | str]) -> None:
        """Drop requests, by their handles or by the names of those that came without one. Outputs
        that are on their way already still arrive; unknown ones are ignored.
        """
        ...

    def engine_of(self, handle: int) -> int | None:
        """The core that has the request; None once it has ended."""
        ...

    def survives(self, handle: int) -> bool:
        """Whether a request with media outlives its core; True where another process keeps them."""
        ...

    @property
    def engine_indices(self) -> Sequence[int]: ...

    def core_status(self, engine_index: int) -> CoreStatus:
        """The current status of one core."""
        ...

    def shutdown(self, timeout: float | None = None) -> None:
        """End the cores: requests may finish for `timeout` seconds (None: not at all), then they
        are aborted. Idempotent; outputs, calls and new requests then raise EngineDeadError.
        """
        ...


class EngineCoreClient(CoreClient, Protocol):
    """A client whose waiting blocks the calling thread."""

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs; empty when there is nothing to do."""
        ...

    def call(self, utility: Utility[T]) -> T:
        """Call every core and combine their answers into one. Raises what a core raised, and
        TimeoutError after the utility's `timeout_s`.
        """
        ...


class AsyncEngineCoreClient(CoreClient, Protocol):
    """A client whose waiting is awaited, in one event loop."""

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs; waits until there are some."""
        ...

    def wait_output(self, limit_s: float) -> EngineCoreOutputs | None:
        """The next outputs, or None after `limit_s` seconds or earlier; blocks the calling thread,
        where the event loop does not run meanwhile.
        """
        ...

    async def call(self, utility: Utility[T]) -> T: ...

    async def scale(self, num_cores: int, drain_timeout_s: float) -> None:
        """Change the number of cores. New ones get requests once they are ready; those that leave
        finish their requests first. Raises TimeoutError if they do not within `drain_timeout_s`.
        """
        ...

    async def is_scaling(self) -> bool:
        """Whether `scale` is at work, for whoever has called it."""
        ...
