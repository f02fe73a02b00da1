"""Step 7 of 8 on a request's path: a step plan becomes tensors, hidden states, and sampled ids.

In: `StepPlan` from scheduling/scheduler.py. Out: `RunnerOutput` for engine/core/core.py. Next:
models/decoder.py, which is given a `Batch`.

Five nouns: `Rows` (what is remembered of each request), `Batch` (this step's tensors), `KVCache`,
the model, the `Sampler`. One verb, `launch(plan)`, whose result is asked for its ids later: that
one form serves plain stepping, overlap and late grammar masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.models.decoder import DecoderModel
from quire.runner.batch import BatchBuilder, StepInputs
from quire.runner.devices.device import Array, Device, Fetched
from quire.runner.drafts import Drafter, kept_places, num_accepted
from quire.runner.forward.forward import Forward
from quire.runner.grammar_mask import GrammarMask
from quire.runner.kv_cache import KVCache
from quire.runner.prompt_logprobs import PromptLogprobsPart
from quire.runner.rows import Rows
from quire.runner.runner_output import PromptTensors, RunnerOutput
from quire.runner.sampling import DrawInputs, Member, SampledTokens, Sampler, SamplerOutput
from quire.scheduling.step import NewRow, StepPlan, StepResult


class Step:
    """A launched step: `sample` once, at once or when its grammar mask is known, then `result`.

    Only `result` waits for the device. By then later steps may have been launched.
    """

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        inputs: StepInputs,
        hidden: Tensor,
        drawing: DrawInputs | None,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._inputs = inputs
        self._hidden: Tensor | None = hidden
        self._drawing = drawing
        self._ending: PendingOutput | None = None
        self._output: RunnerOutput | None = None

    def sample(self, mask: GrammarMask | None = None) -> None:
        """Draw the sampled rows' tokens, of those that `mask` allows."""
        assert self._hidden is not None, "a step is sampled once"
        self._ending = self._runner.finish(self._inputs, self._hidden, self._drawing, mask)
        self._hidden = self._drawing = None
        if self._ending.guesses is not None:
            self._runner.await_verification(self)

    def result(self) -> RunnerOutput:
        """Wait for the ids and bring them to the host."""
        assert self._ending is not None, "result() comes after sample()"
        if self._output is None:
            self._output = self._to_host(self._ending)
        return self._output

    def _to_host(self, ending: PendingOutput) -> RunnerOutput:
        values = iter(ending.fetched.wait())
        sampled = ending.sampled.to_host([next(values) for _ in ending.sampled.tensors])
        prompts = [p.to_host([next(values) for _ in p.tensors]) for p in ending.prompts]
        result = StepResult(self._plan.step_id, sampled.token_ids.tolist())
        if ending.guesses is not None:
            sampled = self._verify(result, sampled, next(values))
        self._runner.sampler.commit(sampled, ending.members)
        rows = self._inputs.sampled
        result.errors = {int(rows[index]): text for index, text in sampled.errors.items()}
        result.errors |= ending.errors
        return RunnerOutput(result, logprobs=sampled.logprobs, prompt_logprobs=prompts)

    def _verify(self, result: StepResult, sampled: SampledTokens, guesses: Tensor) -> SampledTokens:
        """Keep what right drafts brought, move the rows on, and have new drafts made."""
        inputs, ids = self._inputs, sampled.token_ids.numpy()
        drafts = inputs.drafts
        if drafts is None:
            drafts = np.zeros(len(inputs.sampled), dtype=np.int64)
        accepted = num_accepted(ids, guesses.numpy(), drafts)
        kept = kept_places(accepted, drafts)
        result.token_ids, result.counts = ids[kept].tolist(), accepted.tolist()
        result.num_drafts = self._runner.advance_verified(inputs, accepted, drafts)
        places = {int(place): flat for flat, place in enumerate(kept)}
        logprobs = sampled.logprobs
        return SampledTokens(
            sampled.token_ids,
            None if logprobs is None else logprobs.at(places),
            {index: text for index, text in sampled.errors.items() if index in places},
        )


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """What a step will bring: tokens for `members`, prompts that are complete, and `errors` by row
    of rows that have no token to blame. `guesses` [M]: the drafts that stand where tokens were
    drawn; None: the rows have moved on already. `fetched` are the tensors of the tokens, the
    prompts and the guesses.
    """

    sampled: SamplerOutput
    members: list[Member]
    prompts: list[PromptTensors]
    errors: dict[int, str]
    guesses: Tensor | None
    fetched: Fetched


class NoTokens:
    """A step of a plan without tokens, which only changed rows."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id

    def sample(self, mask: GrammarMask | None = None) -> None:
        """There is nothing to draw."""

    def result(self) -> RunnerOutput:
        """There are no ids."""
        return RunnerOutput(StepResult(self._step_id, []))


class ModelRunner:
    """Runs steps on one device. Everything it needs is made by engine/core/builder.py."""

    def __init__(
        self,
        *,
        model: DecoderModel,
        rows: Rows,
        batches: BatchBuilder,
        kv_cache: KVCache,
        sampler: Sampler,
        device: Device,
        forward: Forward,
        drafter: Drafter | None = None,
    ) -> None:
        """`forward` runs the model, or replays what was recorded of it. `drafter` None: no drafts
        are made.
        """
        if drafter is not None and sampler.has_custom_processors:
            raise ValueError(
                "Custom logits processors see one token of a row in a step: leave out either them "
                "or the drafts."
            )
        self.model = model
        self.rows = rows
        self.kv_cache = kv_cache
        self.sampler = sampler
        self.device = device
        self._batches = batches
        self._forward = forward
        self._prompt_logprobs = PromptLogprobsPart(model, sampler, model.spec.vocab)
        self.drafter = drafter
        self._prepared = -1
        self._unverified: Step | None = None
        rows.parts += [SamplerRows(sampler), self._prompt_logprobs]

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step | NoTokens:
        """Start a step: bring the rows up to date, run the model over the plan's tokens.

        Until `finish` has returned, the rows stand where the tokens start and K/V is written only
        behind that, so that a step that failed can be launched again, whole or in parts. Raises
        RowFailures for rows that cannot run.

        Rows move on only when it is known how many of their drafts were right: a step with drafts
        is waited for before the next one.
        """
        if self._unverified is not None:
            self._unverified.result()
            self._unverified = None
        self.rows.apply(plan)
        if not plan.num_tokens:
            return NoTokens(plan.step_id)
        if plan.step_id != self._prepared:
            self._prepare(plan)
        inputs = self._batches.build(plan)
        drawing = self.sampler.inputs(inputs.sampled, inputs.positions, self.device.stage)
        self._batches.gather(inputs)
        hidden = self._forward(inputs.batch, samples_all=inputs.last is None)
        return Step(self, plan, inputs, hidden, drawing)

    def await_verification(self, step: Step) -> None:
        """The next launch waits for the result of this step, which moves the rows on."""
        self._unverified = step

    def advance_verified(self, inputs: StepInputs, accepted: Array, drafts: Array) -> list[int]:
        """Move the rows of a step on: those that sample got `accepted` [R] tokens, when they had
        verified `drafts` [R]. How many drafts each of these has now.
        """
        sampled = inputs.sampled[np.cumsum(drafts + 1) - 1]
        self.rows.advance(inputs.rows, inputs.counts, sampled, accepted)
        self.rows.num_computed[sampled] -= drafts + 1 - accepted
        rows = sampled.tolist()
        return [0] * len(rows) if self.drafter is None else self.drafter.propose(self.rows, rows)

    def _prepare(self, plan: StepPlan) -> None:
        """What a step does to blocks before it computes: once, however often it is launched."""
        if plan.copies:
            self.kv_cache.copy(plan.copies)
        if plan.zero_blocks:
            self.kv_cache.zero(plan.zero_blocks)
        self._prepared = plan.step_id

    @torch.inference_mode()
    def finish(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        drawing: DrawInputs | None,
        mask: GrammarMask | None,
    ) -> PendingOutput:
        """Sample behind the hidden states [T, C] of a step, and move the rows on to its end.

        If it raises, nothing has moved.
        """
        rows = self.rows
        prompts, errors = self._prompt_logprobs.collect(inputs, hidden, rows)
        guesses = self._guesses(inputs)
        sampled = self._sample(inputs, hidden, drawing, mask)
        fetching = [*sampled.tensors, *(t for prompt in prompts.values() for t in prompt.tensors)]
        fetched = self.device.fetch(fetching if guesses is None else [*fetching, guesses])
        members = self.sampler.members(inputs.sampled)
        # Nothing from here on raises.
        if guesses is None:
            rows.advance(inputs.rows, inputs.counts, inputs.sampled)
        for row in prompts:
            self._prompt_logprobs.remove_row(row)
        return PendingOutput(sampled, members, list(prompts.values()), errors, guesses, fetched)

    def _guesses(self, inputs: StepInputs) -> Tensor | None:
        """The ids [M] int64 that stand where tokens are about to be drawn; None where there are no
        drafts, and none are made.
        """
        if inputs.drafts is None and self.drafter is None:
            return None
        guesses = torch.empty(len(inputs.sampled), dtype=torch.int64, device=self.device.torch)
        self.device.take(self.rows.token_ids, inputs.sampled_rows, inputs.sampled_at, guesses)
        return guesses

    def _sample(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        drawing: DrawInputs | None,
        mask: GrammarMask | None,
    ) -> SamplerOutput:
        if not len(inputs.sampled):
            return SamplerOutput(hidden.new_zeros(0, dtype=torch.int64), hidden.new_zeros(0))
        logits = self._forward.logits(hidden, inputs.last)[: len(inputs.sampled)]
        sent = None
        if mask is not None:
            sent = mask.sent(self.device.stage)
            self.device.flush()
        sampled = self.sampler.sample(logits, inputs.sampled, inputs.positions, sent, drawing)
        self.rows.write(inputs.sampled_rows, inputs.sampled_at, sampled.token_ids)
        return sampled


class SamplerRows:
    """The sampler as a part of the rows."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def add_row(self, row: NewRow) -> None:
        border = row.num_prompt_tokens
        self._sampler.add(
            row.row,
            row.params,
            seed=row.seed,
            prompt_token_ids=row.token_ids[:border],
            output_token_ids=row.token_ids[border:],
        )

    def remove_row(self, row: int) -> None:
        self._sampler.remove(row)
