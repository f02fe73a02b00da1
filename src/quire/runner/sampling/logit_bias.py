"""`logit_bias`: a number added to the logits of given ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from torch import Tensor

from quire.ops import Ops
from quire.params import SamplingParams
from quire.runner.devices.device import Send, Stage
from quire.runner.sampling.part import Edit, EditedRow, staged
from quire.runner.sampling.resident import Resident, with_place


@dataclass(frozen=True, slots=True)
class _Own:
    """One row's ids [n] int32 and what is added to their logits [n] fp32."""

    ids: np.ndarray
    values: np.ndarray


class Biases:
    """Ids and what is added to their logits, per row; -inf forbids."""

    def __init__(self, ops: Ops, send: Send) -> None:
        self._ops = ops
        self._send = send
        self._rows: Resident[_Own] = Resident(self._together)

    def add(self, row: int, values: Mapping[int, float]) -> None:
        """Set the ids of a row, and their values. If a value does not fit this raises and adds
        none.
        """
        ids = np.array(list(values), dtype=np.int32)
        self._rows.add(row, _Own(ids, np.array(list(values.values()), dtype=np.float32)))

    def remove(self, row: int) -> None:
        self._rows.remove(row)

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        entries, values = self._rows.of([place.row for place in places])
        at = staged(places, [0] * len(places), stage)
        return partial(self._ops.bias_logits, places=at, entries=entries, values=values)

    def _together(self, rows: list[_Own]) -> tuple[Tensor, ...]:
        entries = [with_place(place, own.ids[:, None]) for place, own in enumerate(rows)]
        values = [own.values for own in rows]
        return tuple(self._send(np.concatenate(arrays)) for arrays in (entries, values))


class LogitBias:
    """Adds each id's bias to its logit; -inf forbids it, and a forbidden id stays forbidden."""

    parameters: ClassVar[tuple[str, ...]] = ("logit_bias",)

    def __init__(self, ops: Ops, send: Send) -> None:
        self._biases = Biases(ops, send)

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if not params.logit_bias:
            return False
        are_valid = all(bias < math.inf for bias in params.logit_bias.values())
        assert are_valid, "validated with the request"
        self._biases.add(row, params.logit_bias)
        return True

    def remove(self, row: int) -> None:
        self._biases.remove(row)

    def wants(self, row: int, position: int) -> bool:
        return True

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        return self._biases.edit(places, stage)
