"""Step 7 of 8 on a request's path: a step plan becomes tensors, hidden states, and results.

In: `StepPlan` from scheduling/scheduler.py. Out: `RunnerOutput` for engine/core/core.py. Next:
runner/forward/, which runs the model, and back to engine/frontend/output_processor.py.

Five nouns: `Rows` (the state of each request), `Batch` (this step's tensors), `KVCache`, the model,
a `RowHead` for each kind of row (the sampler's, a pooler). One verb, `launch(plan)`, whose result
is fetched later: this serves plain stepping, overlap and late grammar masks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from quire.errors import NotBuiltYet
from quire.models.decoder import HiddenStates
from quire.params import RequestParams
from quire.runner.adapters import AdapterSlots
from quire.runner.batch import BatchBuilder, StepInputs
from quire.runner.block_transfers import BlockTransfers
from quire.runner.devices.device import Array, Device, Fetched
from quire.runner.encoder_outputs import EncoderOutputs
from quire.runner.forward.forward import Forward
from quire.runner.forward.stage_output import StageOutput
from quire.runner.head import HeadStep, RowHead, Watcher
from quire.runner.kv_cache import KVCache
from quire.runner.model import RunnableModel, RunnerViews
from quire.runner.rows import Rows
from quire.step.columns import RunnerOutput
from quire.step.faults import RowFailures
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import NewRow, StepPlan
from quire.step.result import NewTokens, StepResult

_MOST_PREPARED = 1024
"""More steps than are ever in flight."""


class Step:
    """A launched step: call `sample` once its grammar mask, if any, is known; then `result`.

    Only `result` waits for the device. By then later steps may have been launched. `sample` is
    `compute` and `advance`; when several workers run the step, `compute` of all of them comes
    before `advance` of any.
    """

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        inputs: StepInputs,
        states: HiddenStates,
        parts: Sequence[HeadStep],
        result: StepResult,
    ) -> None:
        """`result`: what is known of it so far."""
        self._runner = runner
        self._plan = plan
        self._inputs = inputs
        self._states: HiddenStates | None = states
        self._parts = parts
        self._pending: list[tuple[HeadStep, Fetched]] | None = None
        self._output = RunnerOutput(result)

    def sample(self, mask: GrammarMask | None = None) -> None:
        """Compute the rows' results: tokens among those that `mask` allows, and pooled prompts."""
        self.compute(mask)
        self.advance()

    def drafts(self, row: int, count: int) -> list[int]:
        """Return the first `count` drafts of a row, before `sample`; waits for the device."""
        return self._runner.rows.drafts(row, count)

    def compute(self, mask: GrammarMask | None = None) -> None:
        """Queue the heads' work on the hidden states. If this raises, no row has advanced."""
        assert self._states is not None, "a step is sampled once"
        self._pending = self._runner.finish(self._parts, self._states, mask)
        # the hidden states of a long prompt are large, and nothing reads them any more
        self._states = None

    def advance(self) -> None:
        """Advance the rows to the end of the step, or have the next launch wait for the results
        that do so. Does not raise.
        """
        if self.moves_rows:
            self._runner.await_result(self)
        else:
            self._runner.advance(self._inputs)
        for part in self._parts:
            part.advance()

    @property
    def moves_rows(self) -> bool:
        """Whether the rows that sample advance by the results, which `result` has."""
        return any(part.moves_rows for part in self._parts)

    @property
    def stage_output(self) -> StageOutput:
        """Output for the next stage, until `compute`."""
        return StageOutput(self._states, self._output.result.failed_encodings)

    def advance_unsampled(self) -> None:
        """Advance the rows that do not sample; the others advance with the tokens of the worker
        that samples, which come with a later launch. Does not raise.
        """
        self.advance_others()
        self.await_tokens()

    def advance_others(self) -> None:
        """Advance the rows that do not sample. Does not raise."""
        self._runner.rows.advance(*self._others(), self._inputs.sampled[:0])

    def retreat_others(self) -> None:
        """Undo `advance_others`, before any change of these rows. Does not raise."""
        self._runner.rows.retreat(*self._others())

    def await_tokens(self) -> None:
        """Have the rows that sample advance with the tokens that come with a later launch."""
        self._runner.await_tokens(self)

    def _others(self) -> tuple[Array, Array]:
        """The rows that do not sample, and how many tokens each has computed."""
        inputs = self._inputs
        others = ~np.isin(inputs.rows, inputs.sampled)
        return inputs.rows[others], inputs.counts[others]

    def new_tokens(self) -> NewTokens | None:
        """Return what the sampled rows got, right after `result` for the first time."""
        result, rows = self._output.result, self._sampled_rows().tolist()
        ready = result.num_drafts or [0] * len(rows)
        drafts = [self._runner.rows.drafts(row, n) for row, n in zip(rows, ready, strict=True)]
        return NewTokens(
            self._plan.step_id,
            rows,
            result.token_ids,
            result.counts or [1] * len(rows),
            [token for each in drafts for token in each],
            ready,
        )

    def follow(self, new: NewTokens) -> bool:
        """Advance the sampled rows by what they got; returns False for the tokens of another step
        or part.
        """
        inputs, sampled = self._inputs, self._sampled_rows()
        if new.step_id != self._plan.step_id or new.rows != sampled.tolist():
            return False
        counts = inputs.counts[np.isin(inputs.rows, sampled)]
        drafts = np.zeros_like(sampled) if inputs.drafts is None else inputs.drafts
        self._runner.rows.follow(sampled, counts, drafts, new)
        return True

    def _sampled_rows(self) -> Array:
        """The rows that sample, each once."""
        inputs = self._inputs
        if inputs.drafts is None:
            return inputs.sampled
        return inputs.sampled[np.cumsum(inputs.drafts + 1) - 1]

    def result(self) -> RunnerOutput:
        """Wait for the results and return them on the host. May be called again if it raises."""
        assert self._pending is not None, "result() comes after sample()"
        while self._pending:
            # taken off the list only when it has reported: `result` may be called again after an
            # error
            part, fetched = self._pending[0]
            part.report(fetched.wait(), self._output)
            del self._pending[0]
        return self._output


class NoTokens:
    """A step of a plan without tokens, which only changed rows."""

    moves_rows = False

    def __init__(self, result: StepResult) -> None:
        self._result = result

    @property
    def stage_output(self) -> StageOutput:
        return StageOutput(None, self._result.failed_encodings)

    def sample(self, mask: GrammarMask | None = None) -> None:
        """Do nothing: there is nothing to draw."""

    def drafts(self, row: int, count: int) -> list[int]:
        return []

    def compute(self, mask: GrammarMask | None = None) -> None:
        """Do nothing: there is nothing to compute."""

    def advance(self) -> None:
        """Do nothing: the rows do not advance."""

    advance_unsampled = advance_others = retreat_others = await_tokens = advance

    def new_tokens(self) -> NewTokens | None:
        """Return None: no row has sampled."""
        return None

    def result(self) -> RunnerOutput:
        return RunnerOutput(self._result)


class Heads:
    """A part of the rows: the heads of a runner, which head each row uses, and what watches all
    rows.
    """

    def __init__(self) -> None:
        self._by_kind: dict[type[RequestParams], RowHead] = {}
        self._of_row: dict[int, RowHead] = {}
        self._watchers: list[Watcher] = []

    def register(self, kind: type[RequestParams], head: RowHead) -> None:
        """Use `head` for requests whose parameters are of this type, from now on."""
        assert kind not in self._by_kind, f"{kind.__name__} has a head"
        self._by_kind[kind] = head

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that requests may ask for."""
        return tuple(task for head in self._by_kind.values() for task in head.tasks)

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher` take part in all steps, from now on."""
        self._watchers.append(watcher)

    def of(self, params: RequestParams) -> RowHead:
        """Return the head for a request. Raises NotBuiltYet if the model has none for its kind."""
        head = self._by_kind.get(type(params))
        if head is None:
            raise NotBuiltYet("params", params, "This model has no head for such requests.")
        return head

    def add_row(self, new: NewRow) -> None:
        head = self.of(new.params)
        head.add_row(new)
        self._of_row[new.row] = head
        for watcher in self._watchers:
            watcher.add_row(new)

    def remove_row(self, row: int) -> None:
        self._of_row.pop(row).remove_row(row)
        for watcher in self._watchers:
            watcher.remove_row(row)

    def begin(self, inputs: StepInputs) -> list[HeadStep]:
        """Begin a step: return the part of each head that has rows in it, and of each watcher."""
        steps = [part.begin(inputs) for part in (*self._by_kind.values(), *self._watchers)]
        return [step for step in steps if step is not None]


class ModelRunner(RunnerViews):
    """Runs steps on one device. Everything it needs is made by executor/worker_builder.py."""

    def __init__(
        self,
        *,
        model: RunnableModel,
        rows: Rows,
        batches: BatchBuilder,
        kv_cache: KVCache,
        device: Device,
        forward: Forward,
        adapters: AdapterSlots | None = None,
        media: EncoderOutputs | None = None,
    ) -> None:
        """`forward` runs the model, or replays what was recorded of it. `adapters` of a model with
        room for some; `media` of one with encoders.
        """
        self.model = model
        self.rows = rows
        self.kv_cache = kv_cache
        self.device = device
        self.heads = Heads()
        self.adapters = adapters
        self.media = media
        self.transfers: BlockTransfers | None = None
        """Copies blocks to a tier and back; None: there is none."""
        self._batches = batches
        self._forward = forward
        self._prepared: dict[int, None] = {}
        """The last steps that were prepared: with stages, one that runs again is not the last."""
        self._awaited: Step | None = None
        self._followed: deque[Step] = deque()
        rows.parts.append(self.heads)
        if media is not None:
            rows.parts.append(media)

    def register(self, kind: type[RequestParams], head: RowHead) -> None:
        self.heads.register(kind, head)

    def needs_host_ids(self, params: RequestParams) -> bool:
        return self.heads.of(params).needs_host_ids(params)

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        before: StageOutput | None = None,
        tokens: Sequence[NewTokens] = (),
    ) -> Step | NoTokens:
        """Start a step: update the rows, run the model over the plan's tokens.

        `before`: the output of the stage before, where there is one. `tokens`: what rows got in
        earlier steps, on a worker that does not sample.

        Until `advance` the rows stay where the tokens start, and K/V is written only after that
        position. So a step that failed can be launched again, whole or in parts. When rows advance
        by the results of a step, as with drafts, this first waits for the step before. Raises
        RowFailures for rows that cannot run.
        """
        if self._awaited is not None:
            self._awaited.result()
            self._awaited = None
        # before the plan's changes: a row may leave in this very plan, and its last token still
        # counts
        for new in tokens:
            self._follow(new)
        self.rows.apply(plan)
        # copies are not repeated with a step that runs again: their sources may have been written
        # since
        if plan.step_id not in self._prepared:
            self._prepare(plan)
        if not (plan.decode_rows or plan.chunks):
            return NoTokens(self.empty_result(plan, before))
        if self.media is not None and (errors := self.media.failures(plan, self.rows.num_computed)):
            raise RowFailures(errors)
        inputs = self._batches.build(plan)
        # before the model runs: what the heads send to the device goes with the batch, in one copy
        parts = self.heads.begin(inputs)
        earlier = None if before is None else before.states
        if earlier is not None:
            assert inputs.batch.states is not None, "the first stage reads ids"
            inputs.batch.states[: len(earlier.last)] = earlier.last
        self._batches.gather(inputs)
        if self.media is not None:
            self.media.embed(inputs, self.rows.num_computed)
        states = self._forward(inputs.batch, samples_all=inputs.last is None)
        if earlier is not None:
            states = states.after(earlier)
        return Step(self, plan, inputs, states, parts, self.empty_result(plan, before))

    def _prepare(self, plan: StepPlan) -> None:
        """Copy and zero blocks, fill slots of adapters and encode media before a step computes:
        once, however often it is launched.
        """
        if self.rows.highest_block >= self.kv_cache.pages.due:
            self.kv_cache.pages.expect(self.rows.highest_block)
        if plan.copies:
            self.kv_cache.copy(plan.copies)
        if plan.zero_blocks:
            self.kv_cache.zero(plan.zero_blocks)
        if self.adapters is not None:
            self.adapters.load(plan.adapter_loads)
        if self.media is not None:
            self.media.change(plan)
        else:
            is_first = self._batches.capacity_batch.states is None
            assert not (plan.encodings and is_first), "this runner has no encoders"
        if plan.loads or plan.stores:
            assert self.transfers is not None, "this runner has no tier"
            self.transfers.begin(plan)
        self._prepared[plan.step_id] = None
        if len(self._prepared) > _MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]

    def empty_result(self, plan: StepPlan, before: StageOutput | None = None) -> StepResult:
        """The result of a launched step before its ids are known; `before`: see `launch`."""
        failed = [] if before is None else [*before.failed_encodings]
        failed += [] if self.media is None else self.media.failed_in_step
        return StepResult(plan.step_id, [], failed_encodings=failed)

    @torch.inference_mode()
    def finish(
        self, parts: Sequence[HeadStep], states: HiddenStates, mask: GrammarMask | None
    ) -> list[tuple[HeadStep, Fetched]]:
        """Have the heads compute from the hidden states of a step; returns what each will report.
        If this raises, the rows have not advanced.
        """
        # all heads compute before anything is fetched: what raises then has moved no row
        computed = [(part, part.compute(states, mask)) for part in parts]
        return [(part, self.device.fetch(tensors)) for part, tensors in computed]

    def advance(self, inputs: StepInputs) -> None:
        self.rows.advance(inputs.rows, inputs.counts, inputs.sampled)

    def await_tokens(self, step: Step) -> None:
        """Have the sampled rows of this step advance when their tokens come."""
        self._followed.append(step)

    def _follow(self, new: NewTokens) -> None:
        """Advance the sampled rows of the step that the tokens are of. Those before it could not be
        read on the worker that samples, and their rows have failed.
        """
        # the tokens come in the order of the steps, and some steps have none
        while not self._followed.popleft().follow(new):
            pass

    def await_result(self, step: Step) -> None:
        """Have the next launch wait for the result of this step, which advances the rows."""
        self._awaited = step
