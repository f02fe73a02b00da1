"""The head of generating rows: logits, the sampler, the prompts' log-probabilities, and drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.models.decoder import HiddenStates
from quire.params import RequestParams, SamplingParams
from quire.runner.batch import StepInputs
from quire.runner.devices.device import Array, Device
from quire.runner.drafting.drafter import VerifiedStep
from quire.runner.drafting.drafting import Drafting
from quire.runner.drafting.verification import kept_places, num_accepted
from quire.runner.forward.forward import Forward
from quire.runner.model import RunnableModel
from quire.runner.prompt_logprobs import AnyPromptTensors, PromptLogprobsPart
from quire.runner.rows import Rows
from quire.runner.sampling import Drafts, Member, SampledTokens, Sampler, SamplerOutput
from quire.runner.sampling.sent_mask import sent_mask
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import NewRow
from quire.step.result import StepResult


class TokenHead:
    """Draws a token for each sampled row of a step and writes it into the rows."""

    def __init__(
        self,
        *,
        model: RunnableModel,
        forward: Forward,
        rows: Rows,
        sampler: Sampler,
        device: Device,
        drafting: Drafting | None = None,
        share: Callable[[Tensor], object] | None = None,
    ) -> None:
        """`forward` has run the step's model, and computes its logits. `drafting` None: no drafts
        are made. `share` sends drawn ids [M] to the workers that do not sample.
        """
        self.sampler = sampler
        self.drafting = drafting
        self.rows = rows
        self.prompt_logprobs = PromptLogprobsPart(model, sampler, model.spec.vocab, device.send)
        self._forward = forward
        self._device = device
        self.share = share

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def needs_host_ids(self, params: RequestParams) -> bool:
        return self.sampler.needs_host_ids(_sampling(params))

    def add_row(self, new: NewRow) -> None:
        border = new.num_prompt_tokens
        self.sampler.add(
            new.row,
            _sampling(new.params),
            seed=new.seed,
            prompt_token_ids=new.token_ids[:border],
            output_token_ids=new.token_ids[border:],
        )
        # nearly no request does, and rows without cost nothing
        if _sampling(new.params).scores_prompt:
            self.prompt_logprobs.add_row(new)
        if self.drafting is not None:
            self.drafting.add_row(new)

    def remove_row(self, row: int) -> None:
        if self.prompt_logprobs.pending:
            self.prompt_logprobs.remove_row(row)
        self.sampler.remove(row)
        if self.drafting is not None:
            self.drafting.remove_row(row)

    def begin(self, inputs: StepInputs) -> TokenStep:
        return TokenStep(self, inputs, self._device)

    def guesses(self, inputs: StepInputs) -> Tensor | None:
        """The ids [M] int64 at the positions where tokens will be drawn; None if there are no
        drafts, and none are made.
        """
        if inputs.drafts is None and self.drafting is None:
            return None
        found = torch.empty(len(inputs.sampled), dtype=torch.int64, device=self._device.torch)
        self._device.take(self.rows.token_ids, inputs.sampled_rows, inputs.sampled_at, found)
        return found

    def advance_verified(
        self,
        inputs: StepInputs,
        states: HiddenStates,
        *,
        accepted: Array,
        drafts: Array,
        token_ids: Sequence[int],
        started: float,
    ) -> list[int]:
        """Advance the rows of a step: those that sample got `accepted` [R] tokens of the flat
        `token_ids` after verifying `drafts` [R], in a step that started at a time of the drafts'
        clock. Returns how many drafts each of these has now.
        """
        sampled = inputs.sampled[np.cumsum(drafts + 1) - 1]
        self.rows.advance_verified(inputs.rows, inputs.counts, sampled, drafts, accepted)
        if self.drafting is None:
            return [0] * len(sampled)
        ends = np.cumsum(accepted).tolist()
        new = [token_ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        rows = sampled.tolist()
        self.drafting.note(inputs, rows, drafts, accepted - 1, started)
        # after the rows have advanced: limits follow from the blocks and places that are left
        limits = self.drafting.limits(self.rows, rows)
        return self.drafting.propose(
            self.rows, VerifiedStep(inputs, states, rows, new, drafts, limits)
        )

    def logits(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """Compute the logits of the step's M sampled rows, fp32 [M, V]."""
        return self._forward.logits(hidden, inputs.last)[: len(inputs.sampled)]


class TokenStep:
    """This head's part of one step: sampled tokens and prompt log-probabilities."""

    def __init__(self, head: TokenHead, inputs: StepInputs, device: Device) -> None:
        self._head = head
        self._inputs = inputs
        self._device = device
        self._drawing = head.sampler.inputs(inputs.sampled, inputs.positions, device.stage)
        self._sampled: SamplerOutput
        self._members: list[Member]
        self._prompts: dict[int, list[AnyPromptTensors]]
        self._errors: dict[int, str]
        self._guesses: Tensor | None = None
        self._states: HiddenStates
        self._unknown: Sequence[int] = ()
        self._started = 0.0 if head.drafting is None else head.drafting.clock()

    @property
    def moves_rows(self) -> bool:
        """Whether rows have drafts: they advance once the number of accepted drafts is known."""
        return self._guesses is not None

    def compute(self, states: HiddenStates, mask: GrammarMask | None) -> Sequence[Tensor]:
        """Draw the sampled rows' tokens, among those that `mask` allows, and write them into the
        rows.
        """
        head, inputs, hidden = self._head, self._inputs, states.last
        self._prompts, self._errors = {}, {}
        if head.prompt_logprobs.pending:
            self._prompts, self._errors = head.prompt_logprobs.collect(inputs, hidden, head.rows)
        # read before the sampled ids are written over them
        self._guesses, self._states = head.guesses(inputs), states
        self._unknown = () if mask is None else mask.unknown
        self._sampled = self._sample(hidden, mask)
        self._members = head.sampler.members(inputs.sampled)
        prompts = (tensor for part in self._prompt_parts for tensor in part.tensors)
        guesses = [] if self._guesses is None else [self._guesses]
        return [*self._sampled.tensors, *prompts, *guesses]

    @property
    def _prompt_parts(self) -> list[AnyPromptTensors]:
        """The parts of all prompts that are complete."""
        return [part for parts in self._prompts.values() for part in parts]

    def advance(self) -> None:
        """Drop the log-probabilities of complete prompts, which are reported once."""
        for row in self._prompts:
            self._head.prompt_logprobs.remove_row(row)

    def report(self, values: Sequence[Tensor], output: RunnerOutput) -> None:
        left = iter(values)
        sampled = self._sampled.to_host([next(left) for _ in self._sampled.tensors])
        prompts = [p.to_host([next(left) for _ in p.tensors]) for p in self._prompt_parts]
        output.result.token_ids = sampled.token_ids.tolist()
        kept = None
        if self._guesses is not None:
            sampled, kept = self._verify(output.result, sampled, next(left))
        self._head.sampler.commit(sampled, self._members, kept)
        rows = self._inputs.sampled
        errors = {int(rows[index]): text for index, text in sampled.errors.items()}
        output.result.errors |= errors | self._errors
        output.result.nans |= {int(rows[index]): count for index, count in sampled.nans.items()}
        output.logprobs = sampled.logprobs
        output.parts += prompts

    def _verify(
        self, result: StepResult, sampled: SampledTokens, guesses: Tensor
    ) -> tuple[SampledTokens, Sequence[int] | None]:
        """Keep the tokens of accepted drafts, advance the rows, and have new drafts made. Returns
        the tokens, and which of them are kept, None: all.
        """
        inputs, ids = self._inputs, sampled.token_ids.numpy()
        drafts = inputs.drafts
        if drafts is None:
            # no drafts were verified, but new ones are made, which counts from the same places
            ones = np.ones(len(inputs.sampled), dtype=np.int64)
            self._go_on(result, ones, ones - 1)
            return sampled, None
        firsts = np.cumsum(drafts + 1) - drafts - 1
        # An error after a draft is the next step's, which begins there with the tokens before it.
        later = set(sampled.errors).difference(firsts.tolist()) if sampled.errors else ()
        accepted = num_accepted(ids, guesses.numpy(), drafts, [*self._unknown, *later])
        kept = kept_places(accepted, drafts)
        result.token_ids = ids[kept].tolist()
        self._go_on(result, accepted, drafts)
        places = {int(place): flat for flat, place in enumerate(kept)}
        logprobs = sampled.logprobs
        tokens = SampledTokens(
            sampled.token_ids,
            None if logprobs is None else logprobs.at(places),
            {index: text for index, text in sampled.errors.items() if index in places},
            {index: count for index, count in sampled.nans.items() if index in places},
        )
        return tokens, list(places)

    def _go_on(self, result: StepResult, accepted: Array, drafts: Array) -> None:
        """Advance the rows, and have new drafts made."""
        result.counts = accepted.tolist()
        result.num_drafts = self._head.advance_verified(
            self._inputs,
            self._states,
            accepted=accepted,
            drafts=drafts,
            token_ids=result.token_ids,
            started=self._started,
        )

    def _sample(self, hidden: Tensor, mask: GrammarMask | None) -> SamplerOutput:
        head, inputs = self._head, self._inputs
        if not len(inputs.sampled):
            return SamplerOutput(hidden.new_zeros(0, dtype=torch.int64), hidden.new_zeros(0))
        logits = head.logits(hidden, inputs)
        sent = None
        if mask is not None:
            sent = sent_mask(mask, self._device.stage)
            self._device.flush()
        drafts = None
        if inputs.drafts is not None:
            assert self._guesses is not None, "drafts are read before the rows' tokens are drawn"
            drafts = Drafts(inputs.drafts, self._guesses)
        found = head.sampler.sample(
            logits, inputs.sampled, inputs.positions, sent, self._drawing, drafts
        )
        if head.share is not None:
            # as early as possible: other workers wait for the ids, and this one still has them to
            # write
            head.share(found.token_ids)
        head.rows.write(inputs.sampled_rows, inputs.sampled_at, found.token_ids)
        return found


def _sampling(params: RequestParams) -> SamplingParams:
    assert isinstance(params, SamplingParams), "the head of rows that generate"
    return params
