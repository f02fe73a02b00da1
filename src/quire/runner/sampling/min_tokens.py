"""`min_tokens`: no token that would end the request may be drawn before that many tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from quire.ops import Ops
from quire.params import SamplingParams
from quire.runner.devices.device import Send, Stage
from quire.runner.sampling.logit_bias import Biases
from quire.runner.sampling.part import Edit, EditedRow


@dataclass(frozen=True, slots=True)
class _Floor:
    first_free_position: int
    stop_ids: Tensor | None
    """[n] int64 on the device, for a row with a grammar."""


class MinTokens:
    """Sets EOS and the stop ids to -inf while the output is shorter than `min_tokens`.

    If a grammar allows nothing else, they are allowed after all: a finished text cannot continue. A
    row with a grammar is edited alone.
    """

    parameters: ClassVar[tuple[str, ...]] = ("min_tokens",)

    def __init__(self, ops: Ops, send: Send) -> None:
        self._send = send
        self._biases = Biases(ops, send)
        self._floors: dict[int, _Floor] = {}

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if params.min_tokens == 0 or not params.all_stop_token_ids:
            return False
        stop_ids = sorted(params.all_stop_token_ids)
        first_free = num_prompt_tokens + params.min_tokens
        has_grammar = params.structured_outputs is not None
        kept = self._send(np.array(stop_ids, dtype=np.int64)) if has_grammar else None
        self._floors[row] = _Floor(first_free, kept)
        self._biases.add(row, dict.fromkeys(stop_ids, -math.inf))
        return True

    def remove(self, row: int) -> None:
        del self._floors[row]
        self._biases.remove(row)

    def wants(self, row: int, position: int) -> bool:
        return position < self._floors[row].first_free_position

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        stop_ids = [(place, self._floors[place.row].stop_ids) for place in places]
        others = [place for place, ids in stop_ids if ids is None]
        forbid = self._biases.edit(others, stage) if others else None

        def edit(logits: Tensor) -> None:
            if forbid is not None:
                forbid(logits)
            for place, ids in stop_ids:
                if ids is not None:
                    _forbid_unless_all(logits[place.index], ids)

        return edit


def _forbid_unless_all(logits: Tensor, stop_ids: Tensor) -> None:
    before = logits.index_select(0, stop_ids)
    logits.index_fill_(0, stop_ids, -math.inf)
    has_others = logits.amax() != -math.inf
    logits.index_copy_(0, stop_ids, before.masked_fill_(has_others, -math.inf))
