"""A draft network as it runs after its first pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from quire.models.decoder import DecoderModel, HiddenStates
from quire.models.drafting.inputs import DraftStage
from quire.models.spec import Decoder
from quire.ops import Batch


class LaterPass:
    """Runs the layers of a network on its own states, which are in `Batch.states`."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model

    @property
    def spec(self) -> Decoder:
        return self._model.spec

    def forward(self, batch: Batch) -> HiddenStates:
        stage = self._model.stage
        assert isinstance(stage, DraftStage), "a network that reads states"
        return self._model.forward(batch, hidden=stage.again(batch))

    def logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Scores over the network's vocabulary, fp32. Adapters do not change networks."""
        return self._model.logits(hidden)

    def weight_tensors(self) -> Iterator[Tensor]:
        """None: they are the network's."""
        return iter(())

    def release_weights(self) -> None:
        """Do nothing: the network releases them."""

    def take_weights(self, other: Any) -> None:
        """Do nothing: the network takes them."""
