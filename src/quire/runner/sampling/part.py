"""What a feature that edits logits looks like to the sampler, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from quire.params import SamplingParams

Stage = Callable[[np.ndarray], Tensor]
"""Brings a small array to the device together with the step's others: readable when the model has
run.
"""

Send = Callable[[np.ndarray], Tensor]
"""Brings an array to the device, to stay there."""

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
    """Where a row of a step stands: its index in the logits, its row, and the position of the token
    that is to be drawn.
    """

    index: int
    row: int
    position: int


class LogitsPart(Protocol):
    """One feature that edits logits before temperature, all rows of a step at once.

    A part keeps what it made of a request's parameters, and nothing that sampling changes: what
    depends on earlier tokens is read from the history. So a step can be sampled again, and a
    resumed request goes on as if it had never left.
    """

    parameters: ClassVar[tuple[str, ...]]
    """The fields of `SamplingParams` that ask for this; requests that leave them all at their
    neutral values are not shown to the part.
    """

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> bool:
        """Take a request into `row`; False, and nothing kept, if it does not ask for this. What
        cannot be served raises here and not in a step, and nothing is kept either.
        """
        ...

    def remove(self, row: int) -> None:
        """Forget a row for which `add` returned True."""
        ...

    def wants(self, row: int, position: int) -> bool:
        """Whether the token at `position` is affected; if no part wants a row, it is not copied."""
        ...

    def edit(self, places: Sequence[EditedRow], stage: Stage) -> Edit:
        """What edits these rows, each of which `wants`; not empty."""
        ...


def staged(places: Sequence[EditedRow], borders: Sequence[int], stage: Stage) -> Tensor:
    """The places as `quire.ops.sampling.edits` takes them; borders: where the prompts end."""
    rows = zip(places, borders, strict=True)
    found = [(place.index, place.row, border, place.position) for place, border in rows]
    return stage(np.array(found, dtype=np.int64))
