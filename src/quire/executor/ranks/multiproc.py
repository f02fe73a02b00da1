"""Workers in processes of their own: one for each rank of a model, which all run the same steps."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quire.distributed.expert_exchange import LOOK_S, ExpertExchange
from quire.distributed.mesh import Mesh
from quire.encodable import NotEncodable
from quire.errors import EngineDeadError, InvalidParameter
from quire.executor.platform import Platform
from quire.executor.ranks.aside import AsideCalls
from quire.executor.ranks.failures import RankFailure, cause_of, error_of
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.local_ranks import LocalRanks
from quire.executor.ranks.messages import (
    AskHostIds,
    Call,
    FailedTask,
    Launch,
    RankAnswer,
    Sample,
    Task,
)
from quire.executor.ranks.processes import RankProcesses
from quire.executor.ranks.watch import RankWatch
from quire.executor.token_outbox import TokenOutbox
from quire.executor.worker import Worker
from quire.executor.worker_config import WorkerConfig, WorkerFacts
from quire.executor.worker_extension import check_method, worker_class
from quire.params import RequestParams
from quire.processes.codec import Frame, MessageDecoder, MessageEncoder
from quire.step.columns import RunnerOutput
from quire.step.faults import EarlierFailure, LateFailure
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan

logger = logging.getLogger(__name__)

_SYNC = "check_health"
"""A call that every worker has and that does nothing: after its answer a rank is in no exchange."""


class MultiprocExecutor:
    """The ranks of a model, which `processes` has started.

    One thread calls it, but for `read_adapter`. Invariant: outside of a call ranks work on no task
    but steps whose results have not been read.
    """

    def __init__(
        self, processes: RankProcesses, kind: type[Worker], *, has_drafts: bool = True
    ) -> None:
        """Wait until all ranks are ready. `kind` is the class of workers. `has_drafts`: rows may
        move by the results of a step. Raises the error of one that cannot start.
        """
        self.knows_places = processes.mesh.pp == 1 and not has_drafts
        """Whether every rank knows where any step leaves its rows once it has run it."""
        self._processes = processes
        self._kind = kind
        self.mesh: Mesh = processes.mesh
        self._encoder = MessageEncoder()
        self._decoder = MessageDecoder(RankAnswer)
        self._outbox = TokenOutbox(self.mesh.world_size)
        self._serial = self._num_aborts = 0
        self._settled: dict[int, bool] = {}
        """Steps that have ended since the last task of all ranks: whether they have succeeded."""
        self.num_steps = 0
        """Steps with tokens that were sent to the ranks; one that is run again counts again."""
        self.while_waiting: Callable[[], None] | None = None
        """Called repeatedly while this core waits for the end of a step; None: its ranks wait for
        no other core.
        """
        self._launched: RemoteStep | None = None
        self._flying: deque[RemoteStep] = deque()
        """Steps that are sampled, and whose end is not known."""
        self._fallen: set[RemoteStep] = set()
        """Steps that have failed, which nobody has been told."""
        self._kinds: set[type] = set()
        self._drafts: dict[int, list[int]] = {}
        self._aside = AsideCalls(processes.asides)
        self._poll = select.poll()
        # the watcher's thread may report a failure while a callback is registered: one of both
        # calls it
        self._failing = threading.Lock()
        self._failed = ""
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._awaited_tokens: int | None = None
        """Tokens of the step whose end is awaited; None: none is."""
        self._is_closed = False
        self._ranks = {link.fileno(): rank for rank, link in enumerate(processes.links)}
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)
        self._watch = RankWatch(
            processes.children,
            processes.signs,
            processes.collectives,
            lambda: self._awaited_tokens,
            self._fail,
        )
        self._watch.start()
        try:
            ready = self._all_answers(0, {}, {})
        except BaseException:
            processes.kill()  # who is loading does not look at its link
            self.shutdown()
            raise
        facts = [answer.facts for answer in ready if answer.facts is not None]
        self.facts: WorkerFacts = _of_all(facts)
        self._watch.judge.is_loading = False

    # steps

    def launch(self, plan: StepPlan) -> RemoteStep:
        self._require_alive()
        self._drop_launched()
        step = RemoteStep(self, plan)
        # a step of the same rows goes on from where an earlier one leaves them, so the end of that
        # one has to be known, unless the ranks know it without its results
        while any(step.has_to_wait_for(other) for other in self._flying):
            self._end_oldest()
        if any(step.comes_after(other) for other in self._fallen):
            raise EarlierFailure
        step.follows = any(step.comes_after(other) for other in self._flying)
        self._send_launch(step)
        for new in plan.added:
            self._drafts.pop(new.row, None)
        self._launched = step
        return step

    def needs_host_ids(self, params: RequestParams) -> bool:
        """Whether a request must not be scheduled ahead: with several stages none may, since a step
        does not begin before the last stage has drawn the ids that it reads.
        """
        self._require_alive()
        kind = type(params)
        if self.mesh.pp > 1 and kind in self._kinds:
            return True
        rank, serial = self.mesh.sampling_rank, self._next_serial()
        self._send(self._processes.links[rank], self._encode(AskHostIds(serial, params)))
        answer = self._answer_of(rank, serial)
        if answer.failure is not None:
            raise error_of(answer.failure)
        # asked once for a kind, as a model without a head for it refuses: with stages the answer is
        # yes
        self._kinds.add(kind)
        return bool(answer.value) or self.mesh.pp > 1

    def sample(self, step: RemoteStep, mask: GrammarMask | None) -> None:
        """Have a launched step sampled; the reading of its results says whether it has failed."""
        assert step is self._launched, "a step is sampled before the next one is launched"
        self._launched = None
        self._send_sample(step, mask)
        self._flying.append(step)

    def read(self, step: RemoteStep) -> RankAnswer:
        """Wait for the end of a step, and of those before it. Raises LateFailure for one that has
        failed, EarlierFailure for one that follows one that has.
        """
        while step in self._flying:
            self._end_oldest()
        if isinstance(step.error, EngineDeadError):
            raise step.error
        if step.error is not None:
            self._fallen.discard(step)
            if isinstance(step.error, EarlierFailure):
                raise step.error
            raise LateFailure(step.error)
        assert step.answer is not None, "result() comes after sample()"
        return step.answer

    def drafts_of(self, row: int, count: int) -> list[int]:
        """The first `count` drafts of a row, as the last step of it has left them."""
        return self._drafts.get(row, [])[:count]

    def _send_launch(self, step: RemoteStep) -> None:
        step.serial = self._next_serial()
        self.num_steps += step.plan.num_tokens > 0
        encoded: dict[tuple[int, ...], Sequence[Frame]] = {}
        settled, self._settled = self._settled, {}
        for rank, link in enumerate(self._processes.links):
            tokens = self._outbox.take(rank)
            key = tuple(new.step_id for new in tokens)
            # most ranks get the same message, which is encoded once
            if key not in encoded:
                given = settled, step.plan, tokens, self._num_aborts
                encoded[key] = self._encode(Launch(step.serial, *given, follows=step.follows))
            self._send(link, encoded[key])

    def _send_sample(self, step: RemoteStep, mask: GrammarMask | None) -> None:
        step.mask = mask
        link = self._processes.links[self.mesh.sampling_rank]
        self._send(link, self._encode(Sample(step.serial, mask)))

    def _end_oldest(self) -> None:
        """Wait for the end of the oldest step in flight."""
        step, began = self._flying[0], time.monotonic()
        self._awaited_tokens = step.plan.num_tokens
        try:
            answer = self._answer_of(self.mesh.sampling_rank, step.serial)
        finally:
            self._awaited_tokens = None
        # waiting until other cores have loaded does not make a rank slow
        own_s = max(time.monotonic() - began - answer.waited_s, 0.0)
        self._watch.judge.note_step(own_s, step.plan.num_tokens)
        self._flying.popleft()
        if answer.failure is None:
            self._succeed(step, answer)
        else:
            self._recover(step, answer.failure)

    def _succeed(self, step: RemoteStep, answer: RankAnswer) -> None:
        """Keep a step's results, and what it has drawn for the ranks that have not drawn it: those
        of earlier stages, and where it moves rows by its results also those that share the last.
        """
        step.answer = answer
        self._settled[step.serial] = True
        new = answer.tokens
        if new is None:
            return
        own = self.mesh.sampling_rank
        self._outbox.put(new, range(own))
        if answer.moves_rows:
            self._outbox.put(new, range(own + 1, self.mesh.world_size))
        start = 0
        for row, count in zip(new.rows, new.num_drafts, strict=True):
            self._drafts[row] = new.draft_ids[start : start + count]
            start += count

    def _recover(self, step: RemoteStep, failure: FailedTask) -> None:
        """Wait until every rank has left a step that has failed, and run those again that have
        failed with it, for they were in flight; but not those that follow it.
        """
        rank = self.mesh.sampling_rank
        flying = [(each, self._answer_of(rank, each.serial)) for each in self._flying]
        self._flying.clear()
        failures: dict[int, dict[int, FailedTask]] = {step.serial: {rank: failure}}
        for each, answer in flying:
            failures[each.serial] = {} if answer.failure is None else {rank: answer.failure}
        self._sync(failures)
        self._settled[step.serial] = False
        step.error = cause_of(failures[step.serial])
        self._fallen.add(step)
        lost = [step]
        for each, answer in flying:
            if any(each.comes_after(other) for other in lost):
                self._settled[each.serial] = False
                each.error = EarlierFailure()
                self._fallen.add(each)
                lost.append(each)
                continue
            if answer.failure is None:
                self._succeed(each, answer)
                continue
            self._settled[each.serial] = False
            error = cause_of(failures[each.serial])
            if isinstance(error, RankFailure) and error.is_of_another:
                # its changes of rows were made when it ran first
                each.plan = msgspec.structs.replace(each.plan, removed=[], added=[], new_blocks=[])
                self._send_launch(each)
                self._send_sample(each, each.mask)
                self._flying.append(each)
            else:
                each.error = error
                self._fallen.add(each)
                lost.append(each)

    def _drop_launched(self) -> None:
        """Give up a step whose tokens were not asked for."""
        step, self._launched = self._launched, None
        if step is None:
            return
        while self._flying:
            self._end_oldest()
        link = self._processes.links[self.mesh.sampling_rank]
        self._send(link, self._encode(Sample(step.serial, is_dropped=True)))
        self._settled[step.serial] = False
        self._sync({step.serial: {}})

    def _sync(self, failures: dict[int, dict[int, FailedTask]]) -> None:
        """Wait until no rank is in a task, and note what they say of tasks that have failed."""
        self._awaited_tokens = 0
        try:
            self._call_all(_SYNC, (), {}, {}, failures)
        finally:
            self._awaited_tokens = None
        self._processes.reset()
        self._num_aborts += 1
        # each rank rejoins before its next task, so one task has all of them do it now
        if self._processes.ranks_rejoin:
            self._call_all(_SYNC, (), {}, {}, {})

    def waits(self) -> Sequence[tuple[int, int]]:
        """See `RankProcesses.waits`: what a profile of steps needs to know of the exchanges."""
        return self._processes.waits()

    # calls

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """As `Executor.collective_rpc`. A function travels where the environment allows it; raises
        InvalidParameter for what cannot be sent.
        """
        self._require_alive()
        if isinstance(method, str):
            check_method(self._kind, method)
        self._end_all()
        return self._call_idle(method, args, kwargs)

    def _end_all(self) -> None:
        """Wait until no step is in flight."""
        self._drop_launched()
        while self._flying:
            self._end_oldest()

    def _call_idle(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call all workers while no step is in flight."""
        failures: dict[int, FailedTask] = {}
        values = self._call_all(method, args, kwargs, failures, {})
        if failures:
            self._sync({})  # who fails answers first, and ends the exchange after that
            raise cause_of(failures)
        return values

    def idle_round(self, is_unfinished: bool, is_ending: bool) -> list[tuple[bool, bool]]:
        """See `Worker.idle_round`; ranks that finish nothing of it hang, as in a step. Raises
        PeersLost.
        """
        self._require_alive()
        self._end_all()
        self._awaited_tokens = 0
        try:
            found = self._call_idle("idle_round", (is_unfinished, is_ending), {})
        finally:
            self._awaited_tokens = None
        return [(goes_on, all_end) for goes_on, all_end in found]

    def check_health(self) -> None:
        """Raise EngineDeadError when a rank is gone."""
        self.collective_rpc(_SYNC, (), {})

    def read_adapter(self, folder: str) -> int:
        self._require_alive()
        return self._aside.read_adapter(folder)

    def check_adapter(self, folder: str) -> None:
        self.collective_rpc("check_adapter", (folder,), {})

    def drop_adapter(self, number: int) -> None:
        self.collective_rpc("drop_adapter", (number,), {})

    def _call_all(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        failures: dict[int, FailedTask],
        earlier: dict[int, dict[int, FailedTask]],
    ) -> list[Any]:
        """Call all workers; the values by rank. Failures of the call are put into `failures`, those
        of tasks that came before it into `earlier`, by the task's number.
        """
        serial = self._next_serial()
        try:
            call = Call(serial, self._settled, method, list(args), kwargs, self._num_aborts)
            frames = self._encode(call)
        except NotEncodable as error:
            allowed = f"it cannot be sent to the processes of the workers: {error}"
            raise InvalidParameter("method", str(method), allowed) from error
        self._settled = {}
        for link in self._processes.links:
            self._send(link, frames)
        answers = self._all_answers(serial, failures, earlier)
        return [answer.value for answer in answers]

    # messages

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _encode(self, task: Task) -> Sequence[Frame]:
        return self._encoder.encode(task)

    def _send(self, link: RankLink, frames: Sequence[Frame]) -> None:
        try:
            link.send(frames)
        except (OSError, EOFError) as error:
            raise self._death(self._processes.links.index(link)) from error

    def _answer_of(self, rank: int, serial: int) -> RankAnswer:
        """Wait for the answer of one rank to a task; what others say meanwhile is kept."""
        while True:
            for answer in self._processes.answers[rank]:
                if answer.serial == serial:
                    self._processes.answers[rank].remove(answer)
                    return answer
            self._take()

    def _all_answers(
        self,
        serial: int,
        failures: dict[int, FailedTask],
        earlier: dict[int, dict[int, FailedTask]],
    ) -> list[RankAnswer]:
        """Wait for the answers of all ranks to a task; other answers are older, and forgotten."""
        found: list[RankAnswer] = []
        for rank, queue in enumerate(self._processes.answers):
            answer = self._answer_of(rank, serial)
            for old in queue:
                if old.failure is not None and old.serial in earlier:
                    earlier[old.serial].setdefault(rank, old.failure)
            queue.clear()
            if answer.failure is not None:
                failures.setdefault(rank, answer.failure)
            found.append(answer)
        return found

    def _take(self) -> None:
        """Wait until a rank has said something, and take it in. Raises EngineDeadError when one is
        gone.
        """
        found: list[tuple[int, int]] = []
        if self.while_waiting is not None and (self._flying or self._awaited_tokens is not None):
            while not (found := self._poll.poll(LOOK_S * 1000)):
                self.while_waiting()
        for fd, _ in found or self._poll.poll():
            rank = self._ranks[fd]
            try:
                while (frames := self._processes.links[rank].take()) is not None:
                    self._processes.answers[rank].append(self._decoder.decode(frames))
            except EOFError as error:
                raise self._death(rank) from error

    # the end

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called once, from another thread, with the reason when a rank fails; at
        once where one has failed already.
        """
        with self._failing:
            self._on_failure = callback
            failed = self._failed
        if failed:
            callback(failed)

    def _require_alive(self) -> None:
        if self._failed:
            raise EngineDeadError(self._failed)
        if self._is_closed:
            raise EngineDeadError("The engine was closed; make a new one.")

    def _death(self, rank: int) -> Exception:
        """The error for a rank whose link is closed."""
        if self._failed:  # whoever noticed it has killed all
            return EngineDeadError(self._failed)
        self._fail(rank, self._processes.children[rank].exit_words())
        return self._processes.last_error() or EngineDeadError(self._failed)

    def _fail(self, rank: int, why: str) -> None:
        """End all ranks: a model without one of its parts is none."""
        with self._failing:
            if self._failed or self._is_closed:
                return
            self._failed = f"{self._processes.titles[rank]} {why}."
            on_failure = self._on_failure
        logger.error("%s All ranks of the core end.", self._failed)
        self._processes.kill()
        on_failure(self._failed)

    def shutdown(self) -> None:
        with self._failing:
            if self._is_closed:
                return
            self._is_closed = True
        # first: that processes end is not a failure any more
        self._watch.close()
        self._processes.close()


class RemoteStep:
    """A step that the ranks run. The executor notes its end: its `answer` or its `error`."""

    def __init__(self, executor: MultiprocExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self.plan = plan
        chunked = {chunk.row for chunk in plan.chunks}
        changed = {*plan.removed, *(new.row for new in plan.added)}
        self.rows = {*changed, *plan.decode_rows, *chunked}
        self._going_on = self.rows - changed
        # each stage knows where a chunk of a prompt ends
        ending = {chunk.row for chunk in plan.chunks if not chunk.samples}
        self._open = self.rows if executor.knows_places else ending
        """Rows whose place after the step is known without its results."""
        self.serial = 0
        self.follows = False
        """Whether it goes on where steps in flight leave rows."""
        self.mask: GrammarMask | None = None
        self.answer: RankAnswer | None = None
        self.error: Exception | None = None

    def comes_after(self, other: RemoteStep) -> bool:
        """Whether it has rows of an earlier step."""
        return other.plan.step_id < self.plan.step_id and not self.rows.isdisjoint(other.rows)

    def has_to_wait_for(self, other: RemoteStep) -> bool:
        """Whether it can be launched only when the end of a step in flight is known."""
        shared = self.rows & other.rows
        return not shared <= self._going_on & other._open or bool(shared and self.plan.copies)

    def sample(self, mask: GrammarMask | None = None) -> None:
        """Have the tokens drawn."""
        self._executor.sample(self, mask)

    def drafts(self, row: int, count: int) -> list[int]:
        """Return drafts as the rank that samples has them."""
        return self._executor.drafts_of(row, count)

    def result(self) -> RunnerOutput:
        """Wait for the results. Raises LateFailure for a step that has failed, RuntimeError where
        the rank that samples could not read them.
        """
        answer = self._executor.read(self)
        if answer.output is None:
            raise RuntimeError(answer.unread)
        return answer.output


def open_multiproc(
    config: WorkerConfig,
    *,
    platform: Platform | None = None,
    exchange: ExpertExchange | None = None,
) -> MultiprocExecutor:
    """Start a process for each rank that the plan has; each builds its worker."""
    assert platform is None and exchange is None, "each rank opens the device that the plan names"
    kind = worker_class(config.parallel)
    parallel = config.parallel
    mesh = parallel.mesh
    tier = config.memory.kv_tier
    shared = [] if tier is None or tier.memory_fd < 0 else [tier.memory_fd]
    ranks = LocalRanks(config.program, config.plan, mesh, parallel.thread_cpus, shared)
    return MultiprocExecutor(ranks, kind, has_drafts=config.num_drafts > 0)


def _of_all(facts: Sequence[WorkerFacts]) -> WorkerFacts:
    """The facts of all ranks, as far as the scheduler needs them: as many blocks as each has."""
    return replace(facts[-1], num_blocks=min(each.num_blocks for each in facts))
