"""The rows as a draft network computes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.ops.mixers.spans import Span
from quire.runner.devices.device import Array
from quire.runner.rows import Rows
from quire.step.plan import NewRow


class DraftRows:
    """The rows of the target, whose ids and blocks a draft network shares, with lengths of its own.

    - `num_computed` [num_rows + 1] int64: from which position on the network computes next;
    - `num_tokens` [num_rows + 1] int64: the position of the token that it guesses next.

    After its last pass the network has computed a row up to `num_computed`, drafts included. What
    the target finds in the prefix cache is there for the network, too.
    """

    def __init__(self, rows: Rows) -> None:
        self.pad_row = rows.pad_row
        self.ring_size = rows.ring_size
        self.block_sizes = rows.block_sizes
        self.token_ids = rows.token_ids
        self.tables = rows.tables
        self.device_tables = rows.device_tables
        self.num_tokens = np.zeros_like(rows.num_tokens)
        self.num_computed = np.zeros_like(rows.num_computed)
        self.state_index = np.zeros_like(rows.state_index)
        self.adapter_slots = rows.adapter_slots
        self.position_offsets = rows.position_offsets
        self.prompt_positions = rows.prompt_positions
        self.spans: dict[int, list[Span]] = {}  # which costs guesses at most

    def begin(self, new: NewRow) -> None:
        """Begin a row with what the target finds in the prefix cache."""
        self.num_computed[new.row] = new.num_computed_tokens

    def begin_at(self, rows: Sequence[int] | Array, start: Array, position: Array) -> None:
        """Have the next pass compute `rows` from `start` on, and guess the tokens at `position`."""
        self.num_computed[rows] = start
        self.num_tokens[rows] = position

    def move_on(self, rows: Sequence[int] | Array, count: int | Array) -> None:
        """`count` tokens of the rows are computed, and the next one's is guessed."""
        self.num_computed[rows] += count
        self.num_tokens[rows] += 1
