"""Clients that bring dead cores back: streams go on with the tokens that they would have had.

They wrap a client of core processes and look like one. What is to be run again, and in which order,
the journal of each core says (journal.py); here a core is restarted, at once the first time and
after a pause when restarts bring nothing, and told what it was (control_state.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

from quire.engine.client.client import (
    AsyncEngineCoreClient,
    CoreConnection,
    CoreStatus,
    EngineCoreClient,
)
from quire.engine.client.control_state import REPEATABLE, ControlState
from quire.engine.client.journal import CoreJournal
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest, Finished, FinishReason
from quire.errors import EngineDeadError, EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
LONG_LIFE_S = 30.0
"""A life as long as this was worth its start, whatever it brought."""

POISONOUS = "the engine core died of this request, alone too, so it is not run again"
CANNOT_RESUME = "the engine core died, and a request whose input is still open cannot be resumed"


class CoreLives(CoreConnection, Protocol):
    """A client whose cores have several lives."""

    def assign(self, request: EngineCoreRequest) -> int:
        """Choose the core of a request that is sent later. Raises EngineDeadError, InvalidParameter
        as `add_request` does.
        """
        ...

    def dying_step(self, engine_index: int) -> Collection[int] | None:
        """The requests of the steps that a dead core was running; None when it cannot be known."""
        ...

    def restart_core(self, engine_index: int, first: Sequence[Utility[Any]] = ()) -> None:
        """Start a dead core anew; `first` is performed before anything else that is sent to it."""
        ...


class LivesClient(CoreLives, EngineCoreClient, Protocol):
    """Such a client for a thread."""


class AsyncLivesClient(CoreLives, AsyncEngineCoreClient, Protocol):
    """Such a client for an event loop."""


C = TypeVar("C", bound=CoreLives)


class Supervision(Generic[C]):
    """What both supervisors share.

    `max_restarts` restarts of a core in a row may bring nothing; then the engine is dead.
    Invariant: a core in `_pauses` is dead and will be restarted then.
    """

    def __init__(
        self, client: C, *, max_restarts: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.client = client
        self._max_restarts = max_restarts
        self._clock = clock
        self._journals: dict[int, CoreJournal] = {}
        self._control = ControlState()
        self._pauses: dict[int, float] = {}
        self._began: dict[int, float] = {}
        self._error: EngineDeadError | None = None
        self._is_closed = False
        self.num_restarts = 0

    # requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Keep a request and send it, at once or when its core can have it."""
        self._require_alive()
        engine_index = self.engine_of(request.handle)
        if engine_index is None:
            engine_index = self._assign(request)
        if self._journal(engine_index).add(request):
            self._send(engine_index, request)

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop requests."""
        for journal in self._journals.values():
            for handle in handles:
                journal.drop(handle)
        self.client.abort_requests(handles)
        self._send_due()

    def engine_of(self, handle: int) -> int | None:
        """The core that has the request, in this life or the next."""
        for engine_index, journal in self._journals.items():
            if handle in journal.entries:
                return engine_index
        return None

    def _assign(self, request: EngineCoreRequest) -> int:
        """The core for a new request; a dead one will be back."""
        try:
            return self.client.assign(request)
        except EngineDeadError:
            if self._is_closed:
                raise
            pinned = request.data_parallel_rank
            indices = self.client.engine_indices if pinned is None else [pinned]
            return min(indices, key=lambda index: len(self._journal(index)))

    def _send(self, engine_index: int, request: EngineCoreRequest) -> None:
        """A core that has just died gets nothing: its burial brings the request back."""
        if self.client.core_status(engine_index).is_running:
            self.client.add_request(request)

    def _journal(self, engine_index: int) -> CoreJournal:
        if engine_index not in self._journals:
            self._journals[engine_index] = CoreJournal(engine_index)
            self._began[engine_index] = self._clock()
        return self._journals[engine_index]

    # cores

    @property
    def engine_indices(self) -> Sequence[int]:
        """The cores there are."""
        return self.client.engine_indices

    def core_status(self, engine_index: int) -> CoreStatus:
        """What is known of one core now."""
        return self.client.core_status(engine_index)

    def restart_core(self, engine_index: int) -> None:
        """Refused: this is done here, when it is due."""
        raise EngineError("The supervisor restarts cores by itself.")

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the cores; none is brought back any more."""
        self._is_closed = True
        self.client.shutdown(timeout_s)

    def _require_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error

    # lives

    def _take_in(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        journal = self._journal(outputs.engine_index)
        was_isolating = journal.is_isolating
        journal.take(outputs)
        if was_isolating:
            self._send_due()
        return outputs

    def _send_due(self) -> None:
        for engine_index, journal in self._journals.items():
            if engine_index not in self._pauses:
                for request in journal.due():
                    self._send(engine_index, request)

    def _bury(self, error: EngineError) -> EngineCoreOutputs:
        """A core has died: its restart is planned; the outputs are the ends of those that do not
        run again. Raises EngineDeadError when it is not brought back any more.
        """
        engine_index = getattr(error, "engine_index", None)
        if engine_index is None or self._is_closed:
            raise error
        journal = self._journal(engine_index)
        if self._clock() - self._began[engine_index] > LONG_LIFE_S:
            journal.num_fruitless = 0
        in_step = self.client.dying_step(engine_index)
        fell = isinstance(error, EngineDeadError) and error.fell_with_group
        death = journal.fell() if fell else journal.died(in_step)
        logger.error("%s %d requests run again.", error, len(journal))
        ends = [Finished(h, FinishReason.ERROR, message=POISONOUS) for h in death.convicted]
        ends += [Finished(h, FinishReason.ERROR, message=CANNOT_RESUME) for h in death.lost]
        self._plan_restart(journal, error)
        self._restart_due()
        outputs = EngineCoreOutputs(finished=ends, timestamp=self._clock())
        outputs.engine_index = engine_index
        return outputs

    def _plan_restart(self, journal: CoreJournal, error: BaseException) -> None:
        if journal.num_fruitless > self._max_restarts:
            self._error = EngineDeadError(
                f"Engine core {journal.engine_index} was restarted {self._max_restarts} times and "
                f"died again without getting on: {error}"
            )
            raise self._error from error
        pause_s = 0.0
        if journal.num_fruitless > 1:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (journal.num_fruitless - 2))
        self._pauses[journal.engine_index] = self._clock() + pause_s

    def _restart_due(self) -> None:
        """Begin the lives whose time has come."""
        while due := [index for index, when in self._pauses.items() if when <= self._clock()]:
            self._restart(self._journals[due[0]])

    def _restart(self, journal: CoreJournal) -> None:
        self.num_restarts += 1
        try:
            self.client.restart_core(journal.engine_index, self._control.replay())
        except (OSError, EngineError) as error:
            journal.died(())
            self._plan_restart(journal, error)
            return
        del self._pauses[journal.engine_index]
        self._began[journal.engine_index] = self._clock()
        journal.restarted()
        self._send_due()

    def _are_running(self) -> bool:
        client = self.client
        return all(client.core_status(index).is_running for index in client.engine_indices)


class SyncSupervisor(Supervision[LivesClient]):
    """`EngineCoreClient` whose cores come back. `sleep` waits for so many seconds."""

    def __init__(
        self,
        client: LivesClient,
        *,
        max_restarts: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(client, max_restarts=max_restarts, clock=clock)
        self._sleep = sleep
        self._held: deque[EngineCoreOutputs] = deque()

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs; empty when there is nothing to do, or when a core has just died."""
        return self._held.popleft() if self._held else self._next()

    def call(self, utility: Utility[T]) -> T:
        """Ask every core; again where one died meanwhile, if that does no harm."""
        while True:
            self._require_alive()
            try:
                answer = self.client.call(utility)
            except EngineDeadError as error:
                self._wait_for_restart(utility, error)
            else:
                self._control.note(utility, answer)
                return answer

    def _wait_for_restart(self, utility: Utility[Any], error: EngineDeadError) -> None:
        if self._is_closed:
            raise error
        while not self._are_running():
            self._held.append(self._next())
        if utility.method not in REPEATABLE:
            text = f"An engine core died while {utility.method} ran. It is back: call again."
            raise EngineError(text) from error

    def _next(self) -> EngineCoreOutputs:
        self._require_alive()
        self._restart_due()
        if self._pauses and all(
            index in self._pauses or not journal for index, journal in self._journals.items()
        ):
            self._sleep(max(0.0, min(self._pauses.values()) - self._clock()))
            self._restart_due()
            return EngineCoreOutputs()
        try:
            return self._take_in(self.client.get_output())
        except EngineError as error:
            return self._bury(error)


class AsyncSupervisor(Supervision[AsyncLivesClient]):
    """`AsyncEngineCoreClient` whose cores come back."""

    def __init__(
        self,
        client: AsyncLivesClient,
        *,
        max_restarts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(client, max_restarts=max_restarts, clock=clock)
        self._waiting: list[asyncio.Future[None]] = []

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs; empty when a core has just died."""
        self._require_alive()
        try:
            return self._take_in(await self.client.get_output())
        except EngineError as error:
            self._require_alive()
            outputs = self._bury(error)
            self._arm()
            return outputs
        finally:
            self._wake()

    async def call(self, utility: Utility[T]) -> T:
        """Ask every core; again where one died meanwhile, if that does no harm."""
        while True:
            self._require_alive()
            try:
                answer = await self.client.call(utility)
            except EngineDeadError as error:
                await self._wait_for_restart(utility, error)
            else:
                self._control.note(utility, answer)
                return answer

    async def scale(self, num_cores: int, drain_timeout_s: float) -> None:
        """Have so many cores."""
        self._require_alive()
        await self.client.scale(num_cores, drain_timeout_s)

    async def _wait_for_restart(self, utility: Utility[Any], error: EngineDeadError) -> None:
        """`get_output`, which somebody awaits, finds the death and restarts the core."""
        while not self._are_running():
            if self._is_closed or self._error is not None:
                raise error
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        if utility.method not in REPEATABLE:
            text = f"An engine core died while {utility.method} ran. It is back: call again."
            raise EngineError(text) from error

    def _wake(self) -> None:
        if self._waiting and (self._error is not None or self._is_closed or self._are_running()):
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def _arm(self) -> None:
        """Restart a core that pauses when its time has come."""
        if self._pauses:
            delay_s = max(0.0, min(self._pauses.values()) - self._clock())
            asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        if self._is_closed:
            return
        try:
            self._restart_due()
            self._arm()
        except EngineDeadError:
            self.client.shutdown()  # whoever awaits outputs learns of it there
        self._wake()
