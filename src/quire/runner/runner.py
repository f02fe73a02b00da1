"""Step 6 of 8 on a request's path: a step plan becomes tensors, hidden states, and sampled ids.

In: `StepPlan` from scheduling/scheduler.py. Out: `StepOutput` for engine/core.py. Next:
models/decoder.py, which is given a `Batch`.

Five nouns: `Rows` (what is remembered of each request), `Batch` (this step's tensors), `KVCache`,
the model, the `Sampler`. One verb, `launch(plan)`, whose result is asked for its ids later: that
one form serves plain stepping, overlap and late grammar masks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.models.decoder import DecoderModel
from quire.ops import Batch
from quire.runner.batch import BatchBuilder, StepInputs
from quire.runner.device import CpuDevice
from quire.runner.kv_cache import KVCache
from quire.runner.prompt_logprobs import PromptLogprobs
from quire.runner.rows import Rows
from quire.runner.sampling import Sampler, SamplerOutput
from quire.runner.step_output import PromptColumns, StepOutput
from quire.scheduling.step import NewRow, StepPlan, StepResult


class Step:
    """A launched step: `sample` once, at once or when its grammar mask is known, then `result`."""

    def __init__(
        self, runner: ModelRunner, plan: StepPlan, inputs: StepInputs, hidden: Tensor
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._inputs = inputs
        self._hidden = hidden
        self._sampled: SamplerOutput | None = None
        self._prompts: list[PromptColumns] = []

    def sample(self, mask: Tensor | None = None) -> None:
        """Draw the sampled rows' tokens; `mask` [M, ceil(V/32)] int32 is the grammar's bitmask."""
        self._sampled, self._prompts = self._runner.finish(self._inputs, self._hidden, mask)

    def result(self) -> StepOutput:
        """Wait for the ids and bring them to the host."""
        sampled = self._sampled
        assert sampled is not None, "result() comes after sample()"
        rows = self._inputs.sampled.tolist()
        return StepOutput(
            StepResult(
                step_id=self._plan.step_id,
                token_ids=sampled.token_ids.tolist(),
                errors={rows[index]: text for index, text in sampled.errors.items()},
            ),
            logprobs=sampled.logprobs,
            prompt_logprobs=self._prompts,
        )


class ModelRunner:
    """Runs steps on one device. Everything it needs is made by engine/builder.py."""

    def __init__(
        self,
        *,
        model: DecoderModel,
        rows: Rows,
        batches: BatchBuilder,
        kv_cache: KVCache,
        sampler: Sampler,
        device: CpuDevice,
        forward: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        """`forward` stands for the model's own where a recorded step is replayed instead."""
        self.model = model
        self.rows = rows
        self.kv_cache = kv_cache
        self.sampler = sampler
        self.device = device
        self._batches = batches
        self._forward = model.forward if forward is None else forward
        self._prompt_logprobs = PromptLogprobs(model, sampler, device, model.spec.vocab)
        rows.parts += [SamplerRows(sampler), self._prompt_logprobs]

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step:
        """Start a step: bring the rows up to date, run the model over the plan's tokens."""
        self.rows.apply(plan)
        if plan.copies:
            self.kv_cache.copy(plan.copies)
        if plan.zero_blocks:
            self.kv_cache.zero(plan.zero_blocks)
        inputs = self._batches.build(plan)
        return Step(self, plan, inputs, self._forward(inputs.batch))

    @torch.inference_mode()
    def finish(
        self, inputs: StepInputs, hidden: Tensor, mask: Tensor | None
    ) -> tuple[SamplerOutput, list[PromptColumns]]:
        """Sample behind the hidden states [T, C] of a step, and move the rows on to its end."""
        rows = self.rows
        prompts = self._prompt_logprobs.collect(inputs, hidden, rows)
        if len(inputs.sampled):
            logits = self.model.logits(hidden[inputs.last])
            positions = rows.num_tokens[inputs.sampled]
            sampled = self.sampler.sample(logits, inputs.sampled, positions, mask)
            rows.append(inputs.sampled, sampled.token_ids)
            self.sampler.commit(sampled, inputs.sampled)
        else:
            sampled = SamplerOutput(torch.zeros(0, dtype=torch.int64))
        rows.num_computed[inputs.rows] += inputs.counts
        return sampled, prompts


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
