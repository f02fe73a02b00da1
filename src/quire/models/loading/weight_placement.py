"""Placement of the layers' weights: the seam for weights that do not stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from quire.errors import NotBuiltYet
from quire.models.loading.model_parts import Part
from quire.ops import Batch

if TYPE_CHECKING:
    from quire.distributed.named_tensors import TensorPatch


class RunnableLayer(Protocol):
    """A layer as the decoder runs it: `Layer`, `StreamsLayer`, or one with something around it."""

    @property
    def enter(self) -> Callable[[Tensor], Tensor]:
        """Makes h for a pass that begins with this layer."""
        ...

    def __call__(self, x: Tensor, h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x, h -> x, h for the next layer."""
        ...


class WeightPlacement(Protocol):
    """Keeps the weights of layers. What reads a weight holds the tensor itself, so a placement may
    move a tensor's memory, but must not replace the tensor.
    """

    def place(self, layer: int, parts: Sequence[tuple[str, Part]]) -> None:
        """Take the weights of a layer, by name, before those of the next layer are made."""
        ...

    def finish(self, layers: Sequence[RunnableLayer]) -> Sequence[RunnableLayer]:
        """Return the layers to run, once all are made: one for each, in order."""
        ...


class WhereMade:
    """Weights stay where they were made."""

    def place(self, layer: int, parts: Sequence[tuple[str, Part]]) -> None:
        """Do nothing."""

    def finish(self, layers: Sequence[RunnableLayer]) -> Sequence[RunnableLayer]:
        return layers


class GivenWeights:
    """A model that is given new weights by name, where a worker has set what takes them."""

    weight_sink: Callable[[Iterable[tuple[str, Tensor]]], set[str]] | None = None
    settle_weights: Callable[[], None] = staticmethod(lambda: None)
    """Ends what `load_weights` has begun, which the next step would. Raises EngineError where a
    part of a weight has not come.
    """

    patched_tensors: Callable[[Iterable[TensorPatch]], Iterator[dict[str, Tensor]]]
    """The weights that patches change, with those that change together with them, in groups for
    `load_weights`. Set by a worker.
    """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights in place: pairs of a checkpoint's name and a tensor, which are copied, in
        any order and over several calls; returns the names that are the model's.

        What is one weight in the model changes when all its tensors have come. Raises LoadError
        for what does not fit, NotBuiltYet where no worker has the model.
        """
        if self.weight_sink is None:
            raise NotBuiltYet(
                "method", "load_weights", "Call it on the model of an engine's worker."
            )
        return self.weight_sink(weights)
