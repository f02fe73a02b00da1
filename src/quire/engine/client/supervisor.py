"""Restarts dead cores: streams go on with the tokens that they would have had.

The journal of each core says which requests run again, and in which order (journal.py). A core is
restarted at once the first time, and after a pause when restarts make no progress. It is paused or
put to sleep again if the engine was (control_state.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from quire.engine.client.control_state import REPEATABLE, ControlState
from quire.engine.client.journal import CoreJournal, JournalEntry
from quire.engine.client.kept_media import KeptMedia, Remaking
from quire.engine.client.remote_cores import RemoteCores
from quire.engine.client.update_watch import SPOIL, UpdateWatch
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.errors import EngineDeadError, EngineError, InvalidParameter, WeightUpdateError
from quire.processes.child_process import is_shortage
from quire.processes.codec import Frame

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
LONG_LIFE_S = 30.0
"""A core that ran for this long has made progress, even without a token."""

RETRY_S = 1.0
PATIENCE_S = 120.0
"""Time for which a restart is tried again, every `RETRY_S`, while the system lacks descriptors,
memory or process ids. Such tries do not count: they had no chance.
"""

REQUEST_CRASHED_CORE = "this request crashed the engine core, alone as well, so it is not run again"
MEDIA_NOT_KEPT = (
    "the engine core died, and there was no room to keep the media of this request; send it again"
)
MEDIA_LOST = "the engine core died, and the media of this request could not be made again"
REMAKING_S = 0.02
"""Seconds between two looks at media that are being made again."""
CANNOT_RESUME = "the engine core died, and a request whose input is still open cannot be resumed"


class Supervisor:
    """Stands between a client and its cores. The client sees outputs and answers, but no death.

    After `max_restarts` restarts in a row without progress the next death of a core is that of the
    engine. Invariant: a core in `_restart_at` is dead, and will be restarted at that time.
    """

    def __init__(
        self,
        cores: RemoteCores,
        *,
        max_restarts: int,
        clock: Callable[[], float] = time.monotonic,
        media: KeptMedia | None = None,
    ) -> None:
        """media: where sources of media are kept; None: in one of the usual size."""
        self._cores = cores
        self._max_restarts = max_restarts
        self._clock = clock
        self._journals: dict[int, CoreJournal] = {}
        self._control = ControlState()
        self._update = UpdateWatch()
        self._restart_at: dict[int, float] = {}
        self._started_at: dict[int, float] = {}
        self._short_since: dict[int, float] = {}
        """Since when the system lacks what the restart of a core needs."""
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._interrupted: list[tuple[Utility[Any], Future[Any], EngineDeadError]] = []
        """Calls whose core has died, with the futures of their callers."""
        self._error: EngineError | None = None
        self._media = KeptMedia() if media is None else media
        self._remaking: deque[Remaking] = deque()
        """Messages whose media are being made again, in their order."""
        self.num_restarts = 0

    # requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Keep a request and send it, at once or when its core can take it. Raises InvalidParameter
        for a value that cannot be sent; then nothing is kept.
        """
        self._require_alive()
        # encoded before it is kept: what cannot be sent now could not be sent after a restart
        # either
        payload = self._cores.payload_of(request)
        engine_index = self.engine_of(request.handle)
        if engine_index is None:
            engine_index = self._assign(request)
        kept = request if request.media is None else self._media.keep(request)
        if self._journal(engine_index).add(kept):
            self._send(engine_index, request, payload)
        elif request.media is not None and request.handle not in self._media.digests:
            self._give_up(engine_index, request.handle, MEDIA_NOT_KEPT)

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop requests."""
        for journal in self._journals.values():
            for handle in handles:
                journal.drop(handle)
        self._drop_media(handles)
        self._cores.abort_requests(handles)
        self._send_due()

    def entries(self) -> Iterator[tuple[int, JournalEntry]]:
        """The live requests by their handles, and what the journals know of them."""
        for journal in self._journals.values():
            yield from journal.entries.items()

    def release(self, handle: int) -> tuple[int, JournalEntry] | None:
        """Forget a request that goes on elsewhere. Returns its core and entry, None if it ended."""
        engine_index = self.engine_of(handle)
        if engine_index is None:
            return None
        entry = self._journal(engine_index).entries[handle]
        self.abort_requests([handle])
        return engine_index, entry

    def take_back(self, entry: JournalEntry) -> None:
        """Go on with a request that was released."""
        handle = entry.request.handle
        [request] = entry.resumed(0)
        try:
            self.add_request(msgspec.structs.replace(request, data_parallel_rank=None))
        except EngineError as error:
            self._end(0, [Finished(handle, FinishReason.ERROR, message=str(error))])
            return
        engine_index = self.engine_of(handle)
        assert engine_index is not None, "it was added"
        self._journal(engine_index).entries[handle].has_started = entry.has_started

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Return outputs of a request that was released as the next ones."""
        self._outputs.append(outputs)

    def engine_of(self, handle: int) -> int | None:
        """The core that has the request, or will have it after its restart."""
        for engine_index, journal in self._journals.items():
            if handle in journal.entries:
                return engine_index
        return None

    def keeps_media(self, handle: int) -> bool:
        """Whether a request with media can be run again."""
        return handle in self._media.digests

    @property
    def has_requests(self) -> bool:
        """Whether outputs are still to come."""
        return any(self._journals.values())

    def _assign(self, request: EngineCoreRequest) -> int:
        """The core for a new request; if all are dead, one that will be back."""
        try:
            return self._cores.assign(request)
        except EngineDeadError:
            pinned = request.data_parallel_rank
            indices = self._cores.engine_indices if pinned is None else [pinned]
            # journals stand in for loads, which dead cores do not report
            return min(indices, key=lambda index: len(self._journal(index)))

    def _send(self, engine_index: int, request: EngineCoreRequest, payload: list[Frame]) -> None:
        """Send a request, unless the core has just died: its restart sends it again."""
        # the death itself is noticed in `take`, where the journal says what runs again
        if not self._cores.is_dead(engine_index):
            self._cores.send_request(request, payload)

    def _send_due(self) -> None:
        for engine_index, journal in self._journals.items():
            if engine_index not in self._restart_at:
                for request in journal.due():
                    self._send_again(engine_index, journal, request)

    def _send_again(
        self, engine_index: int, journal: CoreJournal, request: EngineCoreRequest
    ) -> None:
        """Send a request that the journal has kept; one that its caller has changed meanwhile to
        what cannot be sent ends by an error. One with media follows when they are there.
        """
        # further input waits as well: it must not overtake the request that it continues
        if request.media is not None or (request.continues and self._remaking):
            try:
                self._remaking.append(self._media.remake(engine_index, request))
            except Exception:
                logger.exception("the media of request %d were not made again", request.handle)
                self._give_up(engine_index, request.handle, MEDIA_LOST)
            self._send_remade()
            return
        try:
            self._send(engine_index, request, self._cores.payload_of(request))
        except InvalidParameter as error:
            self._give_up(engine_index, request.handle, str(error))

    def _send_remade(self) -> None:
        # in their order and not as they become ready, since the journal has put the cleared
        # requests first
        while self._remaking and self._remaking[0].is_ready:
            remade = self._remaking.popleft()
            if remade.handle not in self._journal(remade.engine_index).entries:
                continue  # it has ended meanwhile
            try:
                request = remade.message()
                self._send(remade.engine_index, request, self._cores.payload_of(request))
            except Exception:
                logger.exception("the media of request %d were not made again", remade.handle)
                self._give_up(remade.engine_index, remade.handle, MEDIA_LOST)

    def _give_up(self, engine_index: int, handle: int, text: str) -> None:
        self._journal(engine_index).drop(handle)
        self._cores.abort_requests([handle])
        self._end(engine_index, [Finished(handle, FinishReason.ERROR, message=text)])

    def _journal(self, engine_index: int) -> CoreJournal:
        if engine_index not in self._journals:
            self._journals[engine_index] = CoreJournal(engine_index)
            self._started_at[engine_index] = self._clock()
        return self._journals[engine_index]

    # outputs

    def take(self) -> None:
        """Take in what has come, and do what follows from it: restarts, and calls again."""
        self._cores.take()
        while self._error is None:
            try:
                outputs = self._cores.next_output()
            except EngineError as error:
                # the frames of its traceback have the error and the cores: they would keep each
                # other, and the processes with them, until the garbage collector comes
                self._on_core_death(error.with_traceback(None))
            else:
                if outputs is None:
                    break
                self._note(outputs)
        # restarts first, since a call is repeated only where all cores run
        self._restart_due()
        self._send_remade()
        self._repeat_calls()

    def next_output(self) -> EngineCoreOutputs | None:
        """The next outputs that have come; empty ones for the death of a core that no request ended
        with. Raises EngineDeadError when no core will be restarted any more.
        """
        # first: what has come before the end of the engine is still given out
        if self._outputs:
            return self._outputs.popleft()
        self._require_alive()
        return None

    @property
    def is_idle(self) -> bool:
        """Whether no core has anything to do, or will have after its restart."""
        is_waiting = any(self._journals[index] for index in self._restart_at)
        return self._cores.is_idle and not is_waiting and not self._remaking

    @property
    def next_check_s(self) -> float:
        """Seconds until something is due."""
        due_s = min(self._restart_at.values(), default=float("inf")) - self._clock()
        if self._remaking:
            due_s = min(due_s, REMAKING_S)
        return max(0.0, min(self._cores.next_check_s, due_s))

    def _note(self, outputs: EngineCoreOutputs) -> None:
        journal = self._journal(outputs.engine_index)
        was_isolating = journal.is_isolating
        journal.take(outputs)
        self._drop_media(end.handle for end in outputs.finished)
        self._outputs.append(outputs)
        # these outputs may have cleared the group that ran as a test, so the next one is due
        if was_isolating:
            self._send_due()

    def _require_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error

    def _end(self, engine_index: int, ends: list[Finished]) -> None:
        self._drop_media(end.handle for end in ends)
        outputs = EngineCoreOutputs(finished=ends, timestamp=self._clock())
        outputs.engine_index = engine_index
        self._outputs.append(outputs)

    # calls

    def begin_call(self, utility: Utility[T]) -> Future[T]:
        """Call every core; when one dies meanwhile, call again after its restart if that does no
        harm. Raises EngineDeadError; the future raises what the core raised, or EngineError for a
        call that cannot be repeated.
        """
        self._require_alive()
        answer: Future[T] = Future()
        self._begin(utility, answer)
        return answer

    def _begin(self, utility: Utility[Any], answer: Future[Any]) -> None:
        try:
            self._update.begin(utility)
            future = self._cores.begin_call(utility)
        except WeightUpdateError as error:
            answer.set_exception(error)
        except EngineDeadError as error:
            # no core is left now, but some may be coming back
            self._interrupted.append((utility, answer, error))
        else:
            future.add_done_callback(partial(self._on_answer, utility, answer))

    def _on_answer(self, utility: Utility[Any], answer: Future[Any], future: Future[Any]) -> None:
        # a core may have died after its own answer
        error = future.exception() or self._update.failure_of(utility)
        if isinstance(error, EngineDeadError):
            self._interrupted.append((utility, answer, error))
            return
        if error is None:
            # also for a caller that is gone: the cores are in that state, and a restarted one must
            # come to it
            self._control.note(utility, future.result())
            self._tell(self._update.succeeded(utility, future.result(), self._num_cores))
        else:
            self._tell(self._update.failed(utility, error, self._num_cores))
        if answer.cancelled():
            return
        if error is None:
            answer.set_result(future.result())
        else:
            answer.set_exception(error)

    def _tell(self, calls: Iterable[Utility[Any]]) -> None:
        """Have the cores do what the end of an update asks of them."""
        for call in calls if self._error is None else ():
            # before it is answered: a core that restarts meanwhile must not answer requests
            if call.method == SPOIL:
                self._control.note(call, None)
            self.begin_call(call)

    @property
    def _num_cores(self) -> int:
        return len(self._cores.engine_indices)

    def _repeat_calls(self) -> None:
        """Once all cores run again, or never will, settle the calls that a death interrupted."""
        if not self._interrupted:
            return
        if self._error is not None or not any(map(self._cores.is_dead, self._cores.engine_indices)):
            calls, self._interrupted = self._interrupted, []
            for utility, answer, error in calls:
                if not answer.cancelled():
                    self._repeat(utility, answer, error)

    def _repeat(self, utility: Utility[T], answer: Future[T], error: EngineDeadError) -> None:
        if self._error is not None:
            answer.set_exception(EngineDeadError(str(self._error)))
        elif utility.method in REPEATABLE:
            self._begin(utility, answer)
        else:
            text = f"An engine core died while {utility.method} ran. It is back: call again."
            failure = self._update.failure_of(utility) or EngineError(text)
            failure.__cause__ = error
            answer.set_exception(failure)

    # deaths and restarts

    def _on_core_death(self, error: EngineError) -> None:
        """Plan the core's restart, and end the requests that cannot run again."""
        engine_index = getattr(error, "engine_index", None)
        # what fails while it loads would fail again: the caller sees the error of the start itself
        if engine_index is None or self._cores.core_status(engine_index).is_loading:
            self._error = error
            return
        journal = self._journal(engine_index)
        # no tokens for that long is idleness, not a crash loop
        if self._clock() - self._started_at[engine_index] > LONG_LIFE_S:
            journal.num_fruitless = 0
        in_step = self._cores.dying_step(engine_index)
        fell = isinstance(error, EngineDeadError) and error.ended_with_group
        death = journal.ended_with_group() if fell else journal.died(in_step)
        logger.error("%s Running %d requests again.", error, len(journal))
        ends = [Finished(h, FinishReason.ERROR, message=REQUEST_CRASHED_CORE) for h in death.blamed]
        ends += [Finished(h, FinishReason.ERROR, message=CANNOT_RESUME) for h in death.lost]
        for handle in self._not_kept(journal):
            journal.drop(handle)
            ends.append(Finished(handle, FinishReason.ERROR, message=MEDIA_NOT_KEPT))
        # the journal returns them again when they are due
        self._remaking = deque(r for r in self._remaking if r.engine_index != engine_index)
        # also without ends: an empty output wakes those who wait, so that they see the restart
        self._end(engine_index, ends)
        self._tell(self._update.core_died(engine_index))
        self._plan_restart(journal, error)
        self._restart_due()

    def _drop_media(self, handles: Iterable[int]) -> None:
        if self._media.digests:
            for handle in handles:
                self._media.drop(handle)

    def _not_kept(self, journal: CoreJournal) -> list[int]:
        return [
            handle
            for handle, entry in journal.entries.items()
            if entry.request.media is not None and handle not in self._media.digests
        ]

    def _can_wait(self, engine_index: int, error: BaseException) -> bool:
        """Whether the restart failed for want of something that may come: it is tried again."""
        now = self._clock()
        since = self._short_since.setdefault(engine_index, now)
        if not is_shortage(error) or now - since > PATIENCE_S:
            del self._short_since[engine_index]
            return False
        if since == now:
            logger.error("Engine core %d cannot be restarted yet: %s", engine_index, error)
        self._restart_at[engine_index] = now + RETRY_S
        return True

    def _plan_restart(self, journal: CoreJournal, error: BaseException) -> None:
        if journal.num_fruitless > self._max_restarts:
            self._error = EngineDeadError(
                f"Engine core {journal.engine_index} was restarted {self._max_restarts} times and "
                f"died again without making progress: {error}"
            )
            self._error.__cause__ = error
            return
        pause_s = 0.0
        if journal.num_fruitless > 1:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (journal.num_fruitless - 2))
        self._restart_at[journal.engine_index] = self._clock() + pause_s

    def _restart_due(self) -> None:
        while self._restart_at and self._error is None:
            # looked up anew each time: a restart that fails plans another one
            engine_index, when = min(self._restart_at.items(), key=lambda item: item[1])
            if when > self._clock():
                break
            self._restart(self._journals[engine_index])

    def _restart(self, journal: CoreJournal) -> None:
        try:
            # pause, sleep and adapters first: requests that follow find the state that their
            # callers left
            self._cores.restart_core(journal.engine_index, self._control.replay())
        except (OSError, EngineError) as error:
            if not self._can_wait(journal.engine_index, error):
                self.num_restarts += 1
                # nobody was in a step: the start itself failed, which counts as a death without
                # progress
                journal.died(())
                self._plan_restart(journal, error)
            return
        self.num_restarts += 1
        self._short_since.pop(journal.engine_index, None)
        del self._restart_at[journal.engine_index]
        self._started_at[journal.engine_index] = self._clock()
        journal.restarted()
        self._send_due()
