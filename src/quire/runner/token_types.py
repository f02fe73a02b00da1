"""The text of a pair to which each token belongs, for models that add an embedding of it."""

from __future__ import annotations

import numpy as np

from quire.params import PoolingParams
from quire.runner.devices.device import Array
from quire.step.plan import NewRow


class TokenTypes:
    """The types of rows' tokens: a part of the rows."""

    def __init__(self, num_rows: int, num_types: int) -> None:
        """`num_types` is the number of types that the model has."""
        self._num_types = num_types
        self._second = np.full(num_rows + 1, np.iinfo(np.int64).max)

    def add_row(self, row: NewRow) -> None:
        """Note where the row's second text begins. Raises ValueError where there cannot be one."""
        second = row.params.second_text_at if isinstance(row.params, PoolingParams) else None
        if second is not None and (self._num_types < 2 or second < 0):
            raise ValueError(f"token {second} cannot have type 1 of {self._num_types}")
        self._second[row.row] = np.iinfo(np.int64).max if second is None else second

    def remove_row(self, row: int) -> None:
        """Do nothing: the next request in the row brings its own."""

    def fill(self, types: Array, rows: Array, positions: Array) -> None:
        """Write the types of tokens at these positions of these rows, [T] each."""
        np.greater_equal(positions, self._second[rows], out=types, casting="unsafe")
