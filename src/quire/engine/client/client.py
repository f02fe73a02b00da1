"""Step 3 of 8 on a request's path: how a front end speaks to engine cores, wherever they are.

In: `EngineCoreRequest` from engine/frontend/input_processor.py. Out: `EngineCoreOutputs` for
engine/frontend/output_processor.py. Next: engine/core/core.py, in this process (inproc.py) or
behind sockets (multiprocess.py).

Sending never waits, so that it is the same for everybody. Waiting for outputs and for answers is
what the two protocols differ in: `EngineCoreClient` blocks the calling thread,
`AsyncEngineCoreClient` is awaited. Both end with `EngineDeadError` when a core has died: its
`engine_index` says which; the client goes on with the others and `restart_core` brings it back.
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
    """What is known of one core now.

    `is_running`: its process exists. `is_started`: it has said READY. `silent_s` is the age of its
    last sign of life, `turn_age_s` how long its loop is inside one turn, `step_age_s` how long no
    step was completed (by its signs of life).
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

    def is_alive(self, limit_s: float) -> bool:
        """Whether its loop turns: it said so within `limit_s`, and was not longer in one turn."""
        return self.is_running and max(self.silent_s, self.turn_age_s) <= limit_s

    def status(self, limit_s: float) -> EngineStatusType:
        """Dead without a process, else healthy if it gets on."""
        if not self.is_running:
            return EngineStatusType.DEAD
        return EngineStatusType.HEALTHY if self.is_ready(limit_s) else EngineStatusType.UNHEALTHY

    def is_ready(self, limit_s: float) -> bool:
        """Whether it gets on: it has started, and where work waits a step was completed within
        `limit_s`.
        """
        is_idle = not self.has_work
        return self.is_started and self.is_alive(limit_s) and (is_idle or self.step_age_s < limit_s)


class EngineStatusType(enum.Enum):
    """How a core is, in one word."""

    HEALTHY = "healthy"
    DEAD = "dead"
    UNHEALTHY = "unhealthy"


class CoreConnection(Protocol):
    """What every client has. Nothing here waits."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; its outputs carry its handle. Of a live handle: its next input.

        Where there are several cores the client chooses, and keeps to it.
        """
        ...

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop requests. Outputs of them that are on their way already still come; unknown handles
        are passed over.
        """
        ...

    def engine_of(self, handle: int) -> int | None:
        """The core that has the request; None once it has ended."""
        ...

    @property
    def engine_indices(self) -> Sequence[int]:
        """The cores there are."""
        ...

    def core_status(self, engine_index: int) -> CoreStatus:
        """What is known of one core now."""
        ...

    def restart_core(self, engine_index: int) -> None:
        """Start a dead core anew, with the next incarnation number; what is sent to it meanwhile
        waits until it is ready. A start that fails is a death.

        Raises EngineDeadError where the client cannot start cores.
        """
        ...

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the cores: their requests may finish for `timeout_s` (None: not at all), then they
        are aborted. Idempotent; afterwards every other call raises EngineDeadError.
        """
        ...


class EngineCoreClient(CoreConnection, Protocol):
    """A client whose waiting blocks the calling thread."""

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs; empty when there is nothing to do."""
        ...

    def call(self, utility: Utility[T]) -> T:
        """Ask every core, and give their one answer. Raises what the core raised, TimeoutError
        after the utility's `timeout_s`.
        """
        ...


class AsyncEngineCoreClient(CoreConnection, Protocol):
    """A client whose waiting is awaited, in one event loop."""

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs; waits until there are some."""
        ...

    async def call(self, utility: Utility[T]) -> T:
        """Ask every core, and give their one answer. Raises what the core raised, TimeoutError
        after the utility's `timeout_s`.
        """
        ...

    async def scale(self, num_cores: int, drain_timeout_s: float) -> None:
        """Have so many cores. New ones get requests once they are ready; those that go finish
        theirs first. Raises TimeoutError when they do not within `drain_timeout_s`.
        """
        ...
