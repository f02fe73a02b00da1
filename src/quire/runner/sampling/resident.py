"""Values that rows keep while they run, joined on the device for the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

Own = TypeVar("Own")


class Resident(Generic[Own]):
    """A value per row, and the tensors made of those of some rows.

    They are made again when the rows differ, or a row has a new request: in a steady decode nothing
    is sent.
    """

    def __init__(self, join: Callable[[list[Own]], tuple[Tensor, ...]]) -> None:
        self._join = join
        self._values: dict[int, Own] = {}
        self._rows: list[int] = []
        self._joined: tuple[Tensor, ...] | None = None

    def __getitem__(self, row: int) -> Own:
        return self._values[row]

    def add(self, row: int, value: Own) -> None:
        self._values[row] = value
        self._joined = None

    def remove(self, row: int) -> None:
        del self._values[row]
        self._joined = None

    def of(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the result of `join` for the values of these rows, in their order."""
        if self._joined is None or self._rows != list(rows):
            self._rows = list(rows)
            self._joined = self._join([self._values[row] for row in self._rows])
        return self._joined


def with_place(place: int, entries: np.ndarray) -> np.ndarray:
    """Entries [n, W] of one row -> [n, 1 + W]: which of the places, then the entry."""
    return np.pad(entries, ((0, 0), (1, 0)), constant_values=place)
