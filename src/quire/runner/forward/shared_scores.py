"""The model of steps whose scores the workers of a group compute together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.models.decoder import DecoderModel, HiddenStates
from quire.ops import Batch


class SharedScores:
    """`model`, whose `logits` are computed in parts: each worker of the group asks for those of
    each step. Scores of other rows, which one worker alone needs, are the model's own.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._model = model

    def forward(self, batch: Batch) -> HiddenStates:
        return self._model.forward(batch)

    def logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        return self._model.shared_logits(hidden, adapter_slots)

    def weight_tensors(self) -> Iterator[Tensor]:
        return self._model.weight_tensors()
