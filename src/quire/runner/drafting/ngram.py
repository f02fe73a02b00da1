"""Drafts what followed the last few tokens where they stood before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence


class NgramGuesser:
    """Looks the last n tokens up among those before them, the largest n first.

    Of several places the first counts; it may overlap the tokens that are looked up. The index has
    the first end of every n tokens. It grows when a guess is asked for, by each token once.
    """

    def __init__(self, token_ids: Sequence[int], shortest: int, longest: int) -> None:
        self._tokens = list(token_ids)
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids

    def guess(self, most: int) -> list[int]:
        tokens, end = self._tokens, len(self._tokens)
        self._index_up_to(end - 1)
        for size in self._sizes:
            if size < end:
                found = self._ends.get(tuple(tokens[end - size :]))
                if found is not None:
                    return tokens[found : found + most]
        return []

    def close(self) -> None:
        """Do nothing: nothing is shared."""

    def _index_up_to(self, last: int) -> None:
        """Enter what ends at a token up to `last`, exclusive of the newest token."""
        tokens, note = self._tokens, self._ends.setdefault
        for end in range(self._num_indexed + 1, last + 1):
            for size in self._sizes:
                if size <= end:
                    note(tuple(tokens[end - size : end]), end)
        self._num_indexed = max(self._num_indexed, last)
