"""Builds the logprobs of an output from columns: one dict (or flat entry) per position."""

from __future__ import annotations

from collections.abc import Sequence

from quire.outputs import FlatLogprobs, Logprob
from quire.params import SamplingParams
from quire.step.columns import LogprobColumns
from quire.text.tokenizer import Tokenizer

MAX_CONTEXT = 4
"""The most previous tokens that can complete a character together with a token's bytes."""


class LogprobFrame:
    """The logprobs of one step, as Python numbers; `at[p]` is the row of its p-th new token."""

    __slots__ = ("_counts", "_ids", "_ranks", "_values", "at")

    def __init__(self, columns: LogprobColumns) -> None:
        self.at = {position: row for row, position in enumerate(columns.index)}
        self._ids: list[list[int]] = columns.token_ids.tolist()
        self._values: list[list[float]] = columns.values.tolist()
        self._ranks: list[int] = columns.ranks.tolist()
        self._counts = columns.counts

    def row(self, row: int) -> tuple[list[int], list[float], int]:
        count = self._counts[row]
        return self._ids[row][:count], self._values[row][:count], self._ranks[row]


class Positions:
    """Appends to one list of logprobs, position by position.

    `most` is how many tokens a position may have in addition to its own (None: no limit). They are
    numbered as they come: by their rank, or in the order in which the caller named them.
    """

    __slots__ = ("_most", "_tokenizer", "positions")

    def __init__(self, *, flat: bool, most: int | None, tokenizer: Tokenizer | None) -> None:
        self.positions: list[dict[int, Logprob] | None] | FlatLogprobs
        self.positions = FlatLogprobs() if flat else []
        self._most = None if most is None or most < 0 else most
        self._tokenizer = tokenizer

    def add(self, ids: list[int], values: list[float], rank: int, context: Sequence[int]) -> None:
        """Add a position from its columns, the token itself first, whose `rank` counts where it is
        not among the others; `context` are the tokens before it.
        """
        end = len(ids) if self._most is None else self._most + 1
        first, kept = ids[0], [0]
        for place in range(1, len(ids[:end])):
            if ids[place] != first:
                kept.append(place)
            else:
                rank = place  # where others are as likely, the columns count them in
        texts = self._texts([ids[place] for place in kept], context)
        if isinstance(self.positions, FlatLogprobs):
            kept_ids, kept_values = [ids[i] for i in kept], [values[i] for i in kept]
            self.positions.append_fast(kept_ids, kept_values, [rank, *kept[1:]], texts)
            return
        position = {first: Logprob(values[0], rank, texts[0])}
        for place, text in zip(kept, texts, strict=True):
            if place:
                position[ids[place]] = Logprob(values[place], place, text)
        self.positions.append(position)

    def _texts(self, token_ids: list[int], context: Sequence[int]) -> Sequence[str | None]:
        if self._tokenizer is None:
            return [None] * len(token_ids)
        token_text = self._tokenizer.token_text
        return [token_text(token_id, context) for token_id in token_ids]


class OutputLogprobs:
    """The logprobs of one completion's tokens and their sum."""

    __slots__ = ("_builder", "cumulative")

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.cumulative = 0.0
        self._builder = Positions(
            flat=params.flat_logprobs,
            most=None if params.logprob_token_ids is not None else params.logprobs,
            tokenizer=tokenizer,
        )

    def add(self, frame: LogprobFrame, row: int, context: Sequence[int]) -> None:
        """Add one row of a step's frame; `context` are the output tokens before it."""
        ids, values, rank = frame.row(row)
        self.cumulative += values[0]
        self._builder.add(ids, values, rank, context)

    @property
    def positions(self) -> list[dict[int, Logprob] | None] | FlatLogprobs:
        """One entry per token; the list itself, which keeps growing."""
        return self._builder.positions
