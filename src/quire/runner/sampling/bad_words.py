"""`bad_words`: forbids the token that would complete a forbidden word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from torch import Tensor

from quire.ops import Ops
from quire.ops.sampling.edits import WILD
from quire.params import SamplingParams
from quire.runner.devices.device import Send, Stage
from quire.runner.sampling.part import Edit, EditedRow, TokenHistory, staged
from quire.runner.sampling.resident import Resident, with_place


@dataclass(frozen=True, slots=True)
class _Words:
    """One row's words [n, W] int32, each on the right, WILD before it."""

    words: np.ndarray
    num_prompt_tokens: int


class BadWords:
    """Forbids words of one token always, longer ones where the output ends with their beginning
    (`quire.ops.sampling.edits.forbid_words`).
    """

    parameters: ClassVar[tuple[str, ...]] = ("bad_words",)

    def __init__(self, ops: Ops, history: TokenHistory, send: Send) -> None:
        self._ops = ops
        self._history = history
        self._send = send
        self._rows: Resident[_Words] = Resident(self._together)

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if not params.bad_words_token_ids:
            return False
        longest = max(map(len, params.bad_words_token_ids))
        words = [[WILD] * (longest - len(word)) + word for word in params.bad_words_token_ids]
        self._rows.add(row, _Words(np.array(words, dtype=np.int32), num_prompt_tokens))
        return True

    def remove(self, row: int) -> None:
        self._rows.remove(row)

    def wants(self, row: int, position: int) -> bool:
        return True

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        [words] = self._rows.of([place.row for place in places])
        borders = [self._rows[place.row].num_prompt_tokens for place in places]
        at = staged(places, borders, stage)
        return partial(
            self._ops.forbid_words, history=self._history.token_ids, places=at, words=words
        )

    def _together(self, rows: list[_Words]) -> tuple[Tensor, ...]:
        width = max(row.words.shape[1] for row in rows)
        words = [
            with_place(place, np.pad(row.words, ((0, 0), (missing, 0)), constant_values=WILD))
            for place, row in enumerate(rows)
            for missing in [width - row.words.shape[1]]
        ]
        return (self._send(np.concatenate(words)),)
