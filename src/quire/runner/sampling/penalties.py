"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.sample import penalize_counts_, penalize_repetition_
from quire.params import SamplingParams
from quire.runner.sampling.part import TokenHistory


@dataclass(frozen=True, slots=True)
class _Penalties:
    repetition: float
    frequency: float
    presence: float
    num_prompt_tokens: int


class TokenPenalties:
    """Lowers the logits of tokens that occurred.

    Repetition looks at prompt and output, the others at the output alone.

    Counts are taken from the history each time, into one workspace of all rows: a step costs
    O(tokens so far), which is less than the passes over [V] that kept counts would need, and there
    is no count to rebuild or roll back.
    """

    def __init__(self, history: TokenHistory, vocab_size: int, device: torch.device) -> None:
        self._history = history
        self._workspace = torch.empty(0, device=device)
        self._vocab_size = vocab_size
        self._rows: dict[int, _Penalties] = {}

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        asked = _Penalties(
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            num_prompt_tokens,
        )
        if (asked.repetition, asked.frequency, asked.presence) == (1.0, 0.0, 0.0):
            return False
        self._rows[row] = asked
        return True

    def remove(self, row: int) -> None:
        del self._rows[row]

    def wants(self, row: int, position: int) -> bool:
        asked = self._rows[row]
        return asked.repetition != 1.0 or position > asked.num_prompt_tokens

    def apply(self, logits: Tensor, row: int, position: int) -> None:
        asked = self._rows[row]
        token_ids = self._history.token_ids[row, :position].long()
        if asked.repetition != 1.0:
            penalize_repetition_(logits, token_ids, asked.repetition)
        if asked.frequency != 0.0 or asked.presence != 0.0:
            if not self._workspace.numel():
                self._workspace = self._workspace.new_empty(self._vocab_size)
            output_ids = token_ids[asked.num_prompt_tokens :]
            penalize_counts_(logits, output_ids, asked.frequency, asked.presence, self._workspace)
