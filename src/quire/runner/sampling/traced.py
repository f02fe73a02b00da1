"""`trace_decode_token_ids`: the output is given, and the model only scores it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from quire.params import SamplingParams
from quire.runner.devices.device import Stage
from quire.runner.sampling.part import Edit, EditedRow


@dataclass(frozen=True, slots=True)
class _Trace:
    ids: list[int]
    num_prompt_tokens: int

    def at(self, position: int) -> int | None:
        """The id of a position; None after the end, where a step may score further drafts."""
        index = position - self.num_prompt_tokens
        return self.ids[index] if 0 <= index < len(self.ids) else None


class Traced:
    """Leaves each place of an output the one id that it was given, whatever the parts before have
    left. Raw log-probabilities are taken before; those of processed logits would say nothing.
    """

    parameters: ClassVar[tuple[str, ...]] = ("trace_decode_token_ids",)

    def __init__(self) -> None:
        self._traces: dict[int, _Trace] = {}

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if params.trace_decode_token_ids is None:
            return False
        self._traces[row] = _Trace(params.trace_decode_token_ids, num_prompt_tokens)
        return True

    def remove(self, row: int) -> None:
        del self._traces[row]

    def wants(self, row: int, position: int) -> bool:
        return self._traces[row].at(position) is not None

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        ids = [(place.index, self._traces[place.row].at(place.position)) for place in places]
        rows, kept = stage(np.array(ids, dtype=np.int64)).unbind(1)

        def edit(logits: Tensor) -> None:
            logits.index_fill_(0, rows, -math.inf)
            logits[rows, kept] = 0.0

        return edit
