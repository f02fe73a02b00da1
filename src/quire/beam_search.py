"""Beam search as plain bookkeeping: which texts are kept, given what the model thinks of their next
tokens.

The engine is not in here: a caller asks for the candidates of every live beam and hands them to
`BeamSearch.advance`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.lora.request import LoRARequest
from quire.outputs import CompletionOutput, Logprob
from quire.params import BeamSearchParams, SamplingParams
from quire.prompts import BegunPrompt
from quire.request_options import RequestOptions


def step_params(params: BeamSearchParams, num_output: int = 0) -> SamplingParams:
    """Parameters of one step: one token after `num_output` others, and candidates to grow by."""
    return SamplingParams(
        logprobs=2 * params.beam_width,
        max_tokens=num_output + 1,
        structured_outputs=params.structured_outputs,
        temperature=params.temperature,
        detokenize=False,
        skip_clone=True,
    )


@dataclass(slots=True)
class BeamSearchSequence:
    """One text of a search: `tokens` are prompt and output, `logprobs` one dict per output token.

    `orig_prompt` is the prompt as it was given. The reasons are set only for what was aborted.
    """

    orig_prompt: object
    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best texts of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt. `beams` are the live texts, all of one length; `done` those that
    have ended: with `eos_token_id`, or where texts have a form, with one of `form_ends`, which its
    grammar allows at its end alone.
    """

    def __init__(
        self,
        prompt: object,
        token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_id: int | None,
        max_tokens: int,
        options: RequestOptions | None = None,
        *,
        form_ends: Iterable[int] = (),
    ) -> None:
        adapter = None if options is None else options.lora_request
        self.beams = [BeamSearchSequence(prompt, list(token_ids), lora_request=adapter)]
        self.done: list[BeamSearchSequence] = []
        self._params = params
        ends = set() if params.ignore_eos or eos_token_id is None else {eos_token_id}
        self._ends = ends if params.structured_outputs is None else {*form_ends, eos_token_id}
        self._prompt_length = len(token_ids)
        self._max_length = self._prompt_length + max_tokens

    @property
    def is_over(self) -> bool:
        """Whether no live text may grow any more."""
        return not self.beams or len(self.beams[0].tokens) >= self._max_length

    def step(self) -> tuple[list[BegunPrompt], SamplingParams]:
        """The prompts that continue the beams by one token, and their parameters."""
        border = len(self.beams[0].tokens)
        if self._params.structured_outputs is not None:
            border = self._prompt_length  # a form is one of the output
        begun = [BegunPrompt(beam.tokens[:border], beam.tokens[border:]) for beam in self.beams]
        return begun, step_params(self._params, len(begun[0].output_token_ids))

    def has_ended(self, beam: BeamSearchSequence) -> bool:
        """Whether the last token of a text is one that ends it."""
        return bool(beam.tokens) and beam.tokens[-1] in self._ends

    def take(self, completions: Sequence[CompletionOutput]) -> None:
        """Take the results of one step, for which each beam was continued with `step_params`."""
        if any(completion.finish_reason == "abort" for completion in completions):
            self.abort()
        else:
            self.advance([completion.logprobs[0] for completion in completions])

    def advance(self, candidates: Sequence[Mapping[int, Logprob]]) -> None:
        """Grow the texts by one token: `candidates[i]` are the likeliest next ones of `beams[i]`.

        A text that takes EOS is done; of the others the best `beam_width` live on. What its form
        forbids has the log-probability -inf, and grows no text.
        """
        grown: list[BeamSearchSequence] = []
        for beam, position in zip(self.beams, candidates, strict=True):
            for token_id, logprob in position.items():
                if logprob.logprob != -math.inf:
                    child = _grown(beam, token_id, logprob.logprob, dict(position))
                    (self.done if token_id in self._ends else grown).append(child)
        grown.sort(key=self.score, reverse=True)
        self.beams = grown[: self._params.beam_width]

    def abort(self) -> None:
        """End the search: the live texts are done, with the reason "abort"."""
        for beam in self.beams:
            beam.finish_reason = "abort"
        self.done += self.beams
        self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """The best `beam_width` texts, live or done, best first."""
        everything = sorted([*self.done, *self.beams], key=self.score, reverse=True)
        return everything[: self._params.beam_width]

    def score(self, beam: BeamSearchSequence) -> float:
        """Summed logprob / length ** length penalty; BeamSearchParams has the rules of lengths."""
        if self._params.length_rule == "output":
            length = len(beam.tokens) - self._prompt_length
        else:
            length = len(beam.tokens) - self.has_ended(beam)
        return float(beam.cum_logprob / max(length, 1) ** self._params.length_penalty)


def _grown(
    beam: BeamSearchSequence, token_id: int, logprob: float, position: dict[int, Logprob]
) -> BeamSearchSequence:
    return BeamSearchSequence(
        beam.orig_prompt,
        [*beam.tokens, token_id],
        [*beam.logprobs, position],
        beam.lora_request,
        cum_logprob=beam.cum_logprob + logprob,
    )
