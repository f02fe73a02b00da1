"""The interface between the sampler and a feature that edits logits, and what such a feature may
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from quire.params import SamplingParams
from quire.runner.devices.device import Stage

Edit = Callable[[Tensor], None]
"""Edits logits [R, V] fp32 in place, in the step that it was made for; may be called again."""


class TokenHistory(Protocol):
    """The ids of each row's request, as the runner keeps them; read only.

    When the token at position p of row r is sampled, token_ids[r, :p] is what came before it.
    """

    @property
    def token_ids(self) -> Tensor:
        """Prompt, then output: [num_rows, max_len] int32 on the sampler's device."""
        ...


@dataclass(frozen=True, slots=True)
class EditedRow:
    """A row of a step that is edited: its index in the logits, its row, and the position of the
    token to be drawn.
    """

    index: int
    row: int
    position: int


class LogitsPart(Protocol):
    """One feature that edits logits before temperature, all rows of a step at once.

    A part keeps state made from a request's parameters, but none that sampling changes: whatever
    depends on earlier tokens is read from the history. So a step can be sampled again, and a
    resumed request continues as if it had never been preempted.
    """

    parameters: ClassVar[tuple[str, ...]]
    """The fields of `SamplingParams` that enable this; the part is not called for requests that
    leave them all at their neutral values.
    """

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        """Add a request in `row`; False, with nothing kept, if it does not use this feature. Raises
        here, not in a step, for what cannot be served; then nothing is kept either.
        """
        ...

    def remove(self, row: int) -> None:
        """Forget a row for which `add` returned True."""
        ...

    def wants(self, row: int, position: int) -> bool:
        """Whether the token at `position` is affected; a row that no part edits is not copied."""
        ...

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        """Return the edit of these rows, for each of which `wants` is true; not empty."""
        ...


def staged(places: Sequence[EditedRow], borders: Sequence[int], stage: Stage) -> Tensor:
    """Stage the places as `quire.ops.sampling.edits` needs them; borders: the prompts' ends."""
    rows = zip(places, borders, strict=True)
    found = [(place.index, place.row, border, place.position) for place, border in rows]
    return stage(np.array(found, dtype=np.int64))
