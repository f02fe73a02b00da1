"""Builds the logprobs of a prompt from the parts that a core sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.engine.outputs.kept_part import KeptPart, PartKind, SharedOutput
from quire.engine.outputs.logprobs import MAX_CONTEXT, Positions
from quire.outputs import FlatLogprobs, Logprob
from quire.params import RequestOutputKind, SamplingParams
from quire.step.columns import PromptLogprobs, PromptTokenScores
from quire.text.tokenizer import Tokenizer


class PromptLogprobsBuilder(KeptPart):
    """The logprobs of a prompt, from one message or, chunk by chunk, from several."""

    __slots__ = ("_builder", "_is_given", "_prompt")

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> None:
        self._prompt = prompt_token_ids
        self._is_given = False
        self._builder = Positions(
            flat=params.flat_logprobs,
            most=params.prompt_logprobs,
            tokenizer=tokenizer,
        )
        self._builder.positions.append(None)

    def add(self, part: PromptLogprobs) -> None:
        """Add the rows of a part, which continue those before."""
        if self._is_given:
            return
        columns = part.token_ids.tolist(), part.values.tolist(), part.ranks.tolist()
        for ids, values, rank in zip(*columns, strict=True):
            count = ids.index(-1) if -1 in ids else len(ids)
            here = len(self._builder.positions)
            context = self._prompt[max(0, here - MAX_CONTEXT) : here]
            self._builder.add(ids[:count], values[:count], rank, context)

    @property
    def positions(self) -> list[dict[int, Logprob] | None] | FlatLogprobs:
        """One entry per prompt token, the first None."""
        return self._builder.positions

    def join(self, shared: SharedOutput) -> None:
        """Give the request its positions; DELTA outputs carry them once."""
        if not self._is_given:
            shared.prompt_logprobs = self.positions
            self._is_given = shared.output_kind is RequestOutputKind.DELTA


class PromptScores(KeptPart):
    """The log-probabilities of the ids that a request chose for the tokens of its prompt."""

    __slots__ = ("_scores",)

    def __init__(self) -> None:
        self._scores: np.ndarray[Any, np.dtype[np.float32]] | None = None

    def add(self, part: PromptTokenScores) -> None:
        self._scores = part.values

    def join(self, shared: SharedOutput) -> None:
        """Give the request its scores; DELTA outputs carry them once."""
        if self._scores is not None:
            shared.prompt_token_id_logprobs = self._scores
            if shared.output_kind is RequestOutputKind.DELTA:
                self._scores = None


PROMPT_SCORES = PartKind(
    PromptTokenScores, lambda *_: PromptScores(), asked_by="prompt_logprob_token_ids"
)
PROMPT_LOGPROBS = PartKind(PromptLogprobs, PromptLogprobsBuilder, asked_by="prompt_logprobs")
