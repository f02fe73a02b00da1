"""Steps of only decodes as captured graphs, which a GPU replays without kernel launches by the
host.

A graph reads and writes fixed addresses and has a fixed number of rows, so there is one for each of
about ten sizes; a step is padded to the smallest that holds it. Steps with chunks of prompts are
few and long, and run eagerly. The table of graphs changes only when weights or KV memory move: the
kernels used for a request must not depend on what was captured while it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire.models.decoder import HiddenStates
from quire.ops import Batch
from quire.runner.forward.forward import rows_of_step
from quire.runner.model import StepModel

_LARGEST_POWER = 64
"""Size beyond which powers of two would pad too much: sizes continue in steps of it."""


class Captured(Protocol):
    """Recorded work, and the tensors that each replay writes."""

    @property
    def result(self) -> HiddenStates: ...

    def replay(self) -> None:
        """Queue the work again, on the present contents of its addresses."""
        ...


class Graphs(Protocol):
    """Captures work on a device."""

    def capture(self, work: Callable[[], HiddenStates]) -> Captured:
        """Run the work once, then record it. The capture owns the memory that it allocates; later
        captures share it if they can, so capture the largest first.
        """
        ...


def decode_sizes(most_rows: int) -> list[int]:
    """Return the row counts to capture, ascending, up to `most_rows`: ten for 256."""
    sizes = [1 << i for i in range(_LARGEST_POWER.bit_length()) if 1 << i < most_rows]
    step = max(_LARGEST_POWER, most_rows // 8 // _LARGEST_POWER * _LARGEST_POWER)
    sizes += range(2 * _LARGEST_POWER, most_rows, step)
    return [*sizes, most_rows]


@dataclass(frozen=True, slots=True)
class _Decode:
    """A captured step of decodes, and the batch that it reads."""

    batch: Batch
    captured: Captured


class GraphForward:
    """Replays steps of decodes, runs all others; results are valid until the next call."""

    def __init__(
        self,
        model: StepModel,
        open_graphs: Callable[[], Graphs],
        padding: Callable[[int], Batch],
        sizes: Sequence[int],
    ) -> None:
        """open_graphs: called for each recording. padding: size -> a batch of `size` padding rows,
        at the addresses of steps of this size, with the slots of adapters if rows may have some.
        """
        self._model = model
        self._open_graphs = open_graphs
        self._padding = padding
        self._sizes = sizes
        self._decodes: dict[tuple[int, bool], _Decode] = {}
        self._slots: Tensor | None = None
        self.record()

    def release(self) -> None:
        """Forget the graphs and the memory of their activations."""
        self._decodes = {}

    @torch.inference_mode()
    def record(self) -> None:
        """Capture every size, the largest first; with adapters and without where rows may have
        some.
        """
        graphs = self._open_graphs()
        for size in sorted(self._sizes, reverse=True):
            batch = self._padding(size)
            for slots in [None] if batch.adapter_slots is None else [batch.adapter_slots, None]:
                step = replace(batch, adapter_slots=slots)
                captured = graphs.capture(partial(self._model.forward, step))
                self._decodes[size, slots is not None] = _Decode(step, captured)

    def __call__(self, batch: Batch, *, samples_all: bool) -> HiddenStates:
        self._slots = batch.adapter_slots
        place = batch.num_tokens, batch.adapter_slots is not None
        decode = self._decodes.get(place) if samples_all else None
        if decode is None or batch.embeds is not None:
            return self._model.forward(batch)
        assert _addresses(batch) == _addresses(decode.batch), (
            "the step is not where it was captured"
        )
        decode.captured.replay()
        return decode.captured.result

    def logits(self, hidden: Tensor, last: Tensor | None) -> Tensor:
        return self._model.logits(*rows_of_step(hidden, self._slots, last))


def _addresses(batch: Batch) -> list[int]:
    """The addresses of a step's inputs; attention plans are staged after these."""
    assert batch.ids is not None
    tensors = [batch.ids, batch.positions, *(t for group in batch.groups for t in group.tensors)]
    if batch.adapter_slots is not None:
        tensors.append(batch.adapter_slots)
    return [tensor.data_ptr() for tensor in tensors]
