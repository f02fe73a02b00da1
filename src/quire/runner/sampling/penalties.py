"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from torch import Tensor

from quire.ops import Ops
from quire.params import SamplingParams
from quire.runner.devices.device import Send, Stage
from quire.runner.sampling.part import Edit, EditedRow, TokenHistory, staged
from quire.runner.sampling.resident import Resident


@dataclass(frozen=True, slots=True)
class _Penalties:
    repetition: float
    frequency: float
    presence: float
    num_prompt_tokens: int

    @property
    def numbers(self) -> tuple[float, float, float]:
        return self.repetition, self.frequency, self.presence


class TokenPenalties:
    """Lowers the logits of tokens that occurred (`quire.ops.sampling.edits.penalize`).

    The repetition penalty counts prompt and output, the others only the output.
    """

    parameters: ClassVar[tuple[str, ...]] = (
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    )

    def __init__(self, ops: Ops, history: TokenHistory, send: Send) -> None:
        self._ops = ops
        self._history = history
        self._send = send
        self._rows: Resident[_Penalties] = Resident(self._together)

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        asked = _Penalties(
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            num_prompt_tokens,
        )
        if asked.numbers == (1.0, 0.0, 0.0):
            return False
        self._rows.add(row, asked)
        return True

    def remove(self, row: int) -> None:
        self._rows.remove(row)

    def wants(self, row: int, position: int) -> bool:
        asked = self._rows[row]
        return asked.repetition != 1.0 or position > asked.num_prompt_tokens

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        [penalties] = self._rows.of([place.row for place in places])
        borders = [self._rows[place.row].num_prompt_tokens for place in places]
        longest = max(place.position for place in places)
        return partial(
            self._ops.penalize,
            history=self._history.token_ids[:, :longest],
            places=staged(places, borders, stage),
            penalties=penalties,
        )

    def _together(self, rows: list[_Penalties]) -> tuple[Tensor, ...]:
        numbers = np.array([asked.numbers for asked in rows], dtype=np.float32)
        return (self._send(numbers),)
