"""Random lives of the scheduler over stages: `python -m tests.support.simulation.staged --traces
100000`.

The traces of simulate.py, run by the executor of stages over real rows, and by the hash model as
the last stage. Results are read as many steps later as there are stages. What a stage hands on is
the ids that its rows have for the tokens of a step, and the last one knows which are right.
"""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import msgspec
import numpy as np
import torch

from quire.executor.stages import StagedExecutor
from quire.executor.worker import Worker
from quire.models.decoder import HiddenStates
from quire.ops import Batch
from quire.params import PoolingParams, SamplingParams
from quire.runner.batch import StepInputs
from quire.runner.devices.device import CpuDevice
from quire.runner.forward.stage_output import StageOutput
from quire.runner.head import IdleHead
from quire.runner.rows import Rows
from quire.runner.runner import ModelRunner
from quire.scheduling.request import Request
from quire.scheduling.settings import SchedulerConfig
from quire.step.columns import RunnerOutput
from quire.step.plan import EmbeddedSpan, StepPlan
from quire.step.result import NewTokens, StepResult
from tests.support.simulation.hash_model import HashRunner
from tests.support.simulation.simulate import Expectation, Trace
from tests.support.simulation.traces import run_as_command

NONE = torch.zeros(0)


class IdBatches:
    """Builds steps whose hidden states are ids."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def build(self, plan: StepPlan) -> StepInputs:
        """As `BatchBuilder` does, without what a model needs."""
        chunks = plan.chunks
        rows = np.array([*plan.decode_rows, *(c.row for c in chunks)], dtype=np.int64)
        ready = plan.decode_drafts or [0] * len(plan.decode_rows)
        counts = np.array([*(1 + n for n in ready), *(c.num_tokens for c in chunks)], np.int64)
        drafts = np.array(plan.sampled_drafts, dtype=np.int64)
        sampled = np.repeat(np.array(plan.sampled_rows, dtype=np.int64), drafts + 1)
        places = [
            (row, self._rows.num_computed[row] + i)
            for row, count in zip(rows, counts, strict=True)
            for i in range(count)
        ]
        own = torch.tensor([int(self._rows.token_ids[row, at]) for row, at in places])
        batch = cast(Batch, own)
        return StepInputs(
            *(batch, rows, counts, np.zeros(0), sampled, np.zeros(0)),
            drafts=drafts if drafts.any() else None,
            last=None,
            sampled_rows=NONE,
            sampled_at=NONE,
            token_rows=NONE,
            token_positions=NONE,
        )

    def gather(self, inputs: StepInputs) -> None:
        """The ids are there."""


class StageRunner(ModelRunner):
    """The runner of a stage that does not sample, and computes nothing."""

    def __init__(self, config: SchedulerConfig, groups: list[int | None]) -> None:
        rows = Rows(
            num_rows=config.steps.max_num_seqs,
            max_len=config.max_len + config.num_drafts + 1,
            block_sizes=groups,
            device=CpuDevice(),
            ring_size=config.num_drafts + 2,
        )
        nothing: Any = None
        super().__init__(
            *(),
            model=nothing,
            rows=rows,
            batches=cast(Any, IdBatches(rows)),
            kv_cache=nothing,
            device=rows._device,
            forward=cast(Any, self.ids_of),
        )
        for kind in (SamplingParams, PoolingParams):
            self.register(kind, IdleHead(("generate",)))

    @staticmethod
    def ids_of(batch: Batch, *, samples_all: bool) -> HiddenStates:
        return HiddenStates(cast(torch.Tensor, batch))

    def _prepare(self, plan: StepPlan) -> None:
        self._prepared[plan.step_id] = None


class Stage:
    """An earlier stage as a worker."""

    def __init__(self, runner: StageRunner) -> None:
        self.model_runner = runner

    def launch(self, plan: StepPlan, before: StageOutput | None, tokens: list[NewTokens]) -> Any:
        """Check that stages agree, and run the step."""
        step = self.model_runner.launch(plan, None, tokens)
        own = step.stage_output.states
        if before is not None and before.states is not None:
            assert own is not None and torch.equal(before.states.last, own.last), "stages differ"
        return step


class LastStage:
    """The hash model as a worker that samples."""

    def __init__(self, runner: HashRunner) -> None:
        self.runner = runner

    def launch(self, plan: StepPlan, before: StageOutput, tokens: list[NewTokens]) -> LastStep:
        """Check the ids that the stages before have read, and run the step."""
        assert not tokens, "it has drawn them itself"
        ids = [] if before.states is None else before.states.last.tolist()
        return LastStep(self.runner, plan, ids)


class LastStep:
    """A step of the hash model, whose result is read later."""

    def __init__(self, runner: HashRunner, plan: StepPlan, read: list[int]) -> None:
        result = runner.execute(plan, read)
        rows = plan.sampled_rows
        drafts = [runner.drafts(row) for row in rows]
        self._new = NewTokens(
            *(plan.step_id, rows, result.token_ids, result.counts or [1] * len(rows)),
            [draft for each in drafts for draft in each],
            [len(each) for each in drafts],
        )
        self._output = RunnerOutput(result)
        self._has_tokens = plan.num_tokens > 0
        self.moves_rows = runner.has_drafts and self._has_tokens
        self.stage_output = StageOutput(None)

    def compute(self, mask: Any) -> None:
        """It has."""

    def advance(self) -> None:
        """It has."""

    def result(self) -> RunnerOutput:
        return self._output

    def new_tokens(self) -> NewTokens | None:
        return self._new if self._has_tokens else None


class StagedTrace(Trace):
    """One random life over stages."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.tier = None
        self.num_stages = max(2, self.depth)
        self.config = msgspec.structs.replace(self.config, micro_batches=self.num_stages)
        self.scheduler = type(self.scheduler)(self.config)
        assert self.scheduler.adapters is not None
        self.slots = self.host._slots = self.scheduler.adapters
        config = self.config
        sizes = [
            None if group.kind == "state" else group.block_size or config.key_size
            for group in config.groups
        ]
        stages = [Stage(StageRunner(config, sizes)) for _ in range(self.num_stages - 1)]
        workers = cast(list[Worker], [*stages, LastStage(self.runner)])
        self.executor = StagedExecutor(workers)
        self.steps: deque[tuple[StepPlan, Any]] = deque()
        self.num_reused = 0
        """Rows that were another request's, or the same one's again, when their ids came."""

    def _embedded(self, handle: int, length: int) -> list[EmbeddedSpan]:
        return []

    def _request(self, handle: int, expectation: Expectation) -> Request:
        request = super()._request(handle, expectation)
        request.needs_host_ids |= self.executor.needs_host_ids(request.params)
        return request

    def _execute(self, plan: StepPlan) -> StepResult:
        step = self.executor.launch(plan)
        step.sample()
        self.steps.append((plan, step))
        gone = {*plan.removed, *(new.row for new in plan.added)}
        self.num_reused += sum(bool(gone & set(old.sampled_rows)) for old, _ in self.steps)
        return StepResult(plan.step_id, [])

    def _update(self) -> None:
        plan, step = self.steps.popleft()
        result = step.result().result
        self.num_accepted += len(result.token_ids) - len(plan.sampled_rows)
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        if rows and self.random.random() < self.chaos / 2:
            result.errors = {self.random.choice(rows): "injected"}
        self.results[0] = result
        super()._update()


def run_staged(first: int, count: int) -> None:
    """Run the traces with seeds first .. first+count-1. Raises AssertionError that names the first
    bad seed.
    """
    for seed in range(first, first + count):
        try:
            StagedTrace(seed).run()
        except Exception as error:
            raise AssertionError(f"staged trace {seed} failed: {error!r}") from error


if __name__ == "__main__":
    run_as_command(run_staged, "simulate stages over the hash model")
