"""`allowed_token_ids`: all other tokens are forbidden."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
from torch import Tensor

from quire.ops import Ops
from quire.params import SamplingParams
from quire.runner.devices.device import Send, Stage
from quire.runner.sampling.part import Edit, EditedRow
from quire.runner.sampling.resident import Resident


class AllowedIds:
    """Sets all logits but those of the allowed ids to -inf; EOS is no exception. They are kept as
    the mask of a grammar that never changes.
    """

    parameters: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)

    def __init__(self, ops: Ops, vocab_size: int, send: Send) -> None:
        self._ops = ops
        self._num_words = -(-vocab_size // 32)
        self._send = send
        self._bits: Resident[np.ndarray] = Resident(self._together)

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        if params.allowed_token_ids is None:
            return False
        bits = np.zeros(self._num_words * 32, dtype=np.uint8)
        bits[params.allowed_token_ids] = 1
        self._bits.add(row, np.packbits(bits, bitorder="little").view(np.int32))
        return True

    def remove(self, row: int) -> None:
        self._bits.remove(row)

    def wants(self, row: int, position: int) -> bool:
        return True

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        [bits] = self._bits.of([place.row for place in places])
        rows = stage(np.array([place.index for place in places], dtype=np.int64))
        return partial(self._ops.mask_logits, rows=rows, mask=bits)

    def _together(self, bits: list[np.ndarray]) -> tuple[Tensor, ...]:
        return (self._send(np.stack(bits)),)
