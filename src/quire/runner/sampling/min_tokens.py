"""`min_tokens`: nothing that would end the request may be drawn before so many tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops import Ops
from quire.params import SamplingParams
from quire.runner.sampling.logit_bias import Biases
from quire.runner.sampling.part import Edit, Place, Stage


@dataclass(frozen=True, slots=True)
class _Floor:
    first_free_position: int
    stop_ids: Sequence[int]
    has_grammar: bool


class MinTokens:
    """Sets EOS and the stop ids to -inf while the output is shorter than `min_tokens`.

    If a grammar leaves nothing else, they are allowed after all: a finished text cannot go on. Such
    a row is looked at alone, and its logits are waited for, as its grammar has waited for its ids.
    """

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._biases = Biases(ops, device)
        self._floors: dict[int, _Floor] = {}

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if params.min_tokens == 0 or not params.all_stop_token_ids:
            return False
        stop_ids = sorted(params.all_stop_token_ids)
        first_free = num_prompt_tokens + params.min_tokens
        self._floors[row] = _Floor(first_free, stop_ids, params.structured_outputs is not None)
        self._biases.add(row, dict.fromkeys(stop_ids, -math.inf))
        return True

    def remove(self, row: int) -> None:
        del self._floors[row]
        self._biases.remove(row)

    def wants(self, row: int, position: int) -> bool:
        return position < self._floors[row].first_free_position

    def edit(self, places: Sequence[Place], stage: Stage) -> Edit:
        bound = [place for place in places if self._floors[place.row].has_grammar]
        others = [place for place in places if not self._floors[place.row].has_grammar]
        forbid = self._biases.edit(others, stage) if others else None
        floors = [(place.index, self._floors[place.row]) for place in bound]

        def edit(logits: Tensor) -> None:
            if forbid is not None:
                forbid(logits)
            for index, floor in floors:
                _forbid_unless_all(logits[index], floor.stop_ids)

        return edit


def _forbid_unless_all(logits: Tensor, stop_ids: Sequence[int]) -> None:
    before = logits[stop_ids]
    logits[stop_ids] = -math.inf
    if logits.amax().item() == -math.inf:
        logits[stop_ids] = before
