"""Workers in this process that have a model's layers one after the other.

Each stage keeps the rows of all requests. The first one embeds ids, and the ids of a request's next
token are drawn by the last one: they reach the others as data of a later step, so that several
steps may be in flight. Here, all stages run one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from quire.errors import EngineDeadError
from quire.executor.platform import open_platform
from quire.executor.token_outbox import TokenOutbox
from quire.executor.uniproc import LocalWorkers, take_torch_threads
from quire.executor.worker import Worker
from quire.executor.worker_builder import build_worker
from quire.executor.worker_config import WorkerConfig
from quire.hardware.native import find_native
from quire.models import read_spec
from quire.models.cutting.stages import stages_of
from quire.params import RequestParams
from quire.runner.forward.stage_output import StageOutput
from quire.runner.runner import NoTokens, Step
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan


class StagedExecutor(LocalWorkers):
    """The stages of a model; the last one samples and reports."""

    def __init__(
        self, workers: Sequence[Worker], on_close: Callable[[], None] = lambda: None
    ) -> None:
        """The workers in the order of their layers."""
        super().__init__(workers, on_close)
        self._outbox = TokenOutbox(len(workers))
        self._unread: deque[StagedStep] = deque()
        """Steps that have sampled, and whose results have not been read."""

    def launch(self, plan: StepPlan) -> StagedStep:
        rows = {*plan.decode_rows, *(chunk.row for chunk in plan.chunks)}
        rows.difference_update(new.row for new in plan.added)  # these bring all of their ids
        while any(step.comes_before(rows) for step in self._unread):
            # the oldest first: tokens go into the outbox in the order of the steps
            self._unread[0].settle()
        steps: list[Step | NoTokens] = []
        before: StageOutput | None = None
        for rank, worker in enumerate(self.workers):
            step = worker.launch(plan, before, self._outbox.take(rank))
            before = step.stage_output
            steps.append(step)
        return StagedStep(plan, steps, self._unread, self._outbox)

    def needs_host_ids(self, params: RequestParams) -> bool:
        """Return True: a step does not begin before the last stage has drawn the ids it reads."""
        return True


class StagedStep:
    """A step that has run on all stages."""

    def __init__(
        self,
        plan: StepPlan,
        steps: Sequence[Step | NoTokens],
        unread: deque[StagedStep],
        outbox: TokenOutbox,
    ) -> None:
        self._sampled = set(plan.sampled_rows)
        self._steps = steps
        self._unread = unread
        self._outbox = outbox
        self._output: RunnerOutput | None = None

    def comes_before(self, rows: set[int]) -> bool:
        """Whether the results of this step come before another step of these rows."""
        return self._steps[-1].moves_rows or not rows.isdisjoint(self._sampled)

    def sample(self, mask: GrammarMask | None = None) -> None:
        """Compute on the last stage, then advance all."""
        *earlier, last = self._steps
        last.compute(mask)
        # only now: where the last stage fails, no stage has moved on, and the step can be run again
        last.advance()
        for step in earlier:
            step.advance_unsampled()
        self._unread.append(self)

    def drafts(self, row: int, count: int) -> list[int]:
        """Return drafts as the last stage has them."""
        return self._steps[-1].drafts(row, count)

    def result(self) -> RunnerOutput:
        """Return the last stage's results. Steps are read in their order, as their tokens come."""
        if self._output is None:
            while self in self._unread:
                first = self._unread.popleft()
                if first is not self:
                    first.settle()
            last = self._steps[-1]
            self._output = last.result()
            self._outbox.put(last.new_tokens(), range(len(self._steps) - 1))
        return self._output

    def settle(self) -> None:
        """Read the results for the other stages. Where they cannot be read, the rows fail when the
        engine reads them, and go no further.
        """
        for _ in range(2):
            try:
                self.result()
                return
            except EngineDeadError:
                raise
            except Exception:  # which the engine's own reading raises again
                continue


def open_stages(config: WorkerConfig, sizes: Sequence[int]) -> StagedExecutor:
    """Build the workers of a model in stages of so many layers each. Raises LoadError for a model
    that cannot be cut so.
    """
    decoder = read_spec(config.model.hf_config, config.model.pooler)
    stages = stages_of(decoder, sizes)
    native, _ = find_native()
    restore_threads = take_torch_threads(config.parallel.num_threads if native is None else 1)
    workers: list[Worker] = []
    try:
        for stage in stages:
            workers.append(build_worker(config, open_platform(config), stage=stage))
    except BaseException:
        for worker in workers:
            worker.close()
        restore_threads()
        raise
    return StagedExecutor(workers, restore_threads)
