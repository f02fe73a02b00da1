"""A model as the runner sees it, whoever's code it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from quire.models.decoder import HiddenStates
from quire.models.foreign.implementation import AnyDecoder
from quire.ops import Batch


class StepModel(Protocol):
    """A model as far as its steps need it."""

    def forward(self, batch: Batch) -> HiddenStates:
        """Run all layers and write their part of the memory into the blocks of the batch."""
        ...

    def logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Scores over the vocabulary for hidden [R, C] as `forward` gives it -> fp32 [R, V].
        `adapter_slots` [R]: those of the rows, see `Batch`.
        """
        ...

    def weight_tensors(self) -> Iterator[Tensor]:
        """All tensors that the weights are kept in, in whatever form; some may share memory."""
        ...


class RunnableModel(StepModel, Protocol):
    """A decoder with its weights: `DecoderModel`, or `ForeignModel` of transformers."""

    @property
    def spec(self) -> AnyDecoder: ...

    def release_weights(self) -> None:
        """Give the weights' memory back; `take_weights` comes before the next pass."""
        ...

    def take_weights(self, other: Any) -> None:
        """Run on the weights of `other`, a model of the same spec, from now on."""
        ...


class RunnerViews:
    """The model of a runner, and views of the plan, for methods of `worker_extension_cls`."""

    model: RunnableModel
    vllm_config: Any = None
    """The engine's plan, which a builder gives."""

    @property
    def model_config(self) -> Any:
        """The plan's model."""
        return self.vllm_config.model_config

    def get_model(self) -> RunnableModel:
        """The model that this runner runs."""
        return self.model
