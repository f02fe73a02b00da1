"""The loop of a rank's process: tasks come in their order, and end on all ranks or on none.

A step fails on every rank if it fails on one: who fails says so to the core, ends the exchanges of
its stage, and tells the next stage. At its end the workers of the last stage meet once more; only
then do rows advance. Earlier stages advance at once, since the next chunk of a prompt may follow,
and go back when a later task says that the step has failed; rows that sample wait for their tokens.

Where cores share experts, each step with tokens is a round of theirs, on all ranks alike: a rank
whose step fails before its pass makes a round without rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.mesh import MeshPlace
from quire.distributed.worker_group import ExchangeAborted
from quire.encodable import NotEncodable
from quire.errors import PeersLost
from quire.executor.ranks.failures import failure_of
from quire.executor.ranks.messages import (
    AskHostIds,
    Call,
    FailedTask,
    Launch,
    RankAnswer,
    Sample,
    Task,
)
from quire.executor.ranks.step_ends import only_changes, read_step
from quire.executor.ranks.wiring import RankWiring
from quire.executor.worker import Worker
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.runner.runner import NoTokens, Step
from quire.step.faults import contained
from quire.step.grammar_mask import GrammarMask

logger = logging.getLogger(__name__)


class DroppedStep(Exception):
    """The core has given a step up before its tokens were drawn."""


class RankLoop:
    """Serves the tasks of a worker. Between two tasks nobody of its stage is in an exchange."""

    def __init__(
        self,
        worker: Worker,
        place: MeshPlace,
        wiring: RankWiring,
        *,
        note_done: Callable[[], None],
        rounds: ExpertExchange | None = None,
    ) -> None:
        """`rounds`: those of cores that share experts; None: this one steps independently."""
        self._worker = worker
        self._place = place
        self._link, self._stages = wiring.link, wiring.stages
        self._group, self._rejoin = wiring.group, wiring.rejoin
        self._note_done = note_done
        self._rounds = rounds
        self._waited_s = 0.0
        """Seconds that this rank had waited for other cores before the present step."""
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[Task] = MessageDecoder(Task)  # type: ignore[arg-type]
        self._unsettled: dict[int, Step | NoTokens] = {}
        """Steps of an earlier stage that are not known to have succeeded on the last one."""
        self._failed_after = -1
        """The number of aborts after which a task has failed here last."""
        self._answers = torch.tensor([False]), torch.tensor([True])
        self._width = worker.get_model().spec.dim if place.mesh.pp > 1 else 0

    def run(self) -> None:
        """Serve until the core closes its end of the link, which it may do at any time."""
        with suppress(EOFError):
            self._answer(RankAnswer(0, facts=self._worker.facts))
            while True:
                self._serve(self._next())
                self._note_done()

    def _next(self) -> Task:
        return self._decoder.decode(self._link.receive())

    def _serve(self, task: Task) -> None:
        if isinstance(task, Sample):  # of a step that has failed here before it came
            return
        if isinstance(task, AskHostIds):
            self._ask(task)
            return
        # exchanges of a task that has failed must not meet those of this one
        self._rejoin(task.num_aborts)
        self._settle(task.settled)
        if isinstance(task, Launch):
            self._step(task)
        else:
            self._call(task)

    def _settle(self, settled: Mapping[int, bool]) -> None:
        """Take in the ends of an earlier stage's steps, in their order."""
        for serial, has_succeeded in settled.items():
            step = self._unsettled.pop(serial, None)
            if step is None:
                continue
            if has_succeeded:
                step.await_tokens()
            else:
                step.retreat_others()

    # steps

    def _step(self, task: Launch) -> None:
        rounds = self._rounds
        num_rounds = 0
        if rounds is not None:
            num_rounds, self._waited_s = rounds.num_rounds, rounds.waited_s
        is_launched = is_sent = False
        try:
            before = self._stages.receive(self._width)
            if task.follows and self._failed_after == task.num_aborts:
                raise ExchangeAborted("a step before it has failed")
            is_launched = True
            step = self._worker.launch(task.plan, before, task.tokens)
            is_sent = True
            self._stages.send(step.stage_output, self._wait_of_step_s())
            if not self._place.is_last_stage:
                step.advance_others()
                self._unsettled[task.serial] = step
                return
            step.compute(self._mask(task.serial) if self._place.samples else None)
            moves_rows = self._agree(step.moves_rows)
        except Exception as error:
            self._failed_after = task.num_aborts
            self._fail(task.serial, error, self._wait_of_step_s())
            # the next stage waits for hidden states
            if not is_sent:
                self._stages.send_failure()
            if not is_launched:  # its changes of rows count on all ranks
                self._worker.launch(only_changes(task.plan), None, task.tokens)
            if rounds is not None and task.plan.num_tokens and rounds.num_rounds == num_rounds:
                with suppress(PeersLost):  # which the next step finds
                    rounds.idle_round(True)
            return
        if moves_rows and not self._place.samples:
            step.advance_unsampled()
        else:
            step.advance()
        self._end(task.serial, step, moves_rows)

    def _mask(self, serial: int) -> GrammarMask | None:
        """Wait for the mask of the step that runs."""
        task = self._next()
        assert isinstance(task, Sample) and task.serial == serial, "each step is sampled"
        if task.is_dropped:
            raise DroppedStep
        return task.mask

    def _agree(self, moves_rows: bool) -> bool:
        """Meet the other workers of the stage: the step has succeeded on all. Returns whether it
        moves rows by its results on the one that samples.
        """
        if self._group is None:
            return moves_rows
        return bool(self._group.broadcast(self._answers[moves_rows]))

    def _end(self, serial: int, step: Step | NoTokens, moves_rows: bool) -> None:
        """Answer the step that has advanced the rows."""
        waited_s = self._wait_of_step_s()
        answer = read_step(step, serial, self._place, moves_rows=moves_rows, waited_s=waited_s)
        if answer is not None:
            self._answer(answer)

    def _wait_of_step_s(self) -> float:
        """Seconds that this rank, and others in earlier stages, have waited for other cores in the
        present step.
        """
        if self._rounds is None:
            return 0.0
        return self._stages.waited_s + self._rounds.waited_s - self._waited_s

    def _fail(self, serial: int, error: BaseException, waited_s: float = 0.0) -> None:
        """Tell the core, and only then those who wait for this rank."""
        # these follow from a failure elsewhere, which is logged there
        if not isinstance(error, ExchangeAborted | DroppedStep):
            logger.error("rank %d failed in a task", self._place.rank, exc_info=error)
        self._answer(RankAnswer(serial, failure=failure_of(error), waited_s=waited_s))
        if self._group is not None:
            self._group.abort(f"rank {self._place.rank} failed: {error}")

    # calls

    def _call(self, task: Call) -> None:
        worker = self._worker
        try:
            call = task.method if callable(task.method) else getattr(worker, task.method)
            given = (worker, *task.args) if callable(task.method) else task.args
            value = worker.call(call, *given, **task.kwargs)
        except BaseException as error:  # of a method that the operator has written
            self._fail(task.serial, contained(error))
            return
        try:
            self._answer(RankAnswer(task.serial, value=value))
        except NotEncodable as error:
            text = f"The result cannot be sent to another process: {error}."
            self._answer(RankAnswer(task.serial, failure=FailedTask("EngineError", text)))

    def _ask(self, task: AskHostIds) -> None:
        try:
            value = self._worker.needs_host_ids(task.params)
        except Exception as error:
            self._answer(RankAnswer(task.serial, failure=failure_of(error)))
        else:
            self._answer(RankAnswer(task.serial, value=value))

    def _answer(self, answer: RankAnswer) -> None:
        frames = self._encoder.encode(answer)
        try:
            self._link.send(frames)
        except OSError as error:
            raise EOFError("the core has closed its end of the link") from error
