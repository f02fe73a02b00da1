"""`min_tokens`: nothing that would end the request may be drawn before so many tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Floor:
    first_free_position: int
    stop_ids: Tensor
    has_grammar: bool


class MinTokens:
    """Sets EOS and the stop ids to -inf while the output is shorter than `min_tokens`.

    If a grammar leaves nothing else, they are allowed after all: a finished text cannot go on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._floors: dict[int, _Floor] = {}

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if params.min_tokens == 0 or not params.all_stop_token_ids:
            return False
        self._floors[row] = _Floor(
            num_prompt_tokens + params.min_tokens,
            torch.tensor(sorted(params.all_stop_token_ids), device=self._device),
            params.structured_outputs is not None,
        )
        return True

    def remove(self, row: int) -> None:
        del self._floors[row]

    def wants(self, row: int, position: int) -> bool:
        return position < self._floors[row].first_free_position

    def apply(self, logits: Tensor, row: int, position: int) -> None:
        floor = self._floors[row]
        before = logits[floor.stop_ids]
        logits[floor.stop_ids] = -math.inf
        if floor.has_grammar and logits.amax().item() == -math.inf:
            logits[floor.stop_ids] = before
