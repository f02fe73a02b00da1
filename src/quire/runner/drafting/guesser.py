"""Drafts from tokens alone: one guesser for each request, and the drafter that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.runner.drafting.drafter import VerifiedStep
from quire.runner.rows import Rows
from quire.step.plan import NewRow


class Guesser(Protocol):
    """Guesses how one request goes on."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add new tokens of the request."""
        ...

    def guess(self, most: int) -> list[int]:
        """Return up to `most` next tokens, most > 0; [] for none."""
        ...

    def close(self) -> None:
        """The request has ended, or lost its row."""
        ...


OpenGuesser = Callable[[Sequence[int], Sequence[int]], Guesser]
"""(prompt, output so far) of a request -> its guesser."""


class GuessingDrafter:
    """Drafts with a guesser for each row. Guesses that are not token ids, or too many, are cut."""

    def __init__(self, open_guesser: OpenGuesser, vocab_size: int) -> None:
        self._open = open_guesser
        self._vocab_size = vocab_size
        self._guessers: dict[int, Guesser] = {}

    def add_row(self, new: NewRow) -> None:
        border = new.num_prompt_tokens
        self._guessers[new.row] = self._open(new.token_ids[:border], new.token_ids[border:])

    def remove_row(self, row: int) -> None:
        if (guesser := self._guessers.pop(row, None)) is not None:
            guesser.close()

    def propose(self, rows: Rows, step: VerifiedStep) -> list[int]:
        counts = []
        guessers = [self._guessers.get(row) for row in step.sampled]
        for guesser, new in zip(guessers, step.new_tokens, strict=True):
            if guesser is not None:  # else the request has left, or could not be taken
                guesser.extend(new)
        # All know their tokens by now, so that one that raises costs the others no more than this.
        for row, guesser, most in zip(step.sampled, guessers, step.limits, strict=True):
            drafts = []
            if guesser is not None and most:
                drafts = self._valid(guesser.guess(most), most)
            if drafts:
                rows.write_drafts(row, drafts)
            counts.append(len(drafts))
        return counts

    def _valid(self, drafts: Sequence[int], most: int) -> list[int]:
        """The drafts up to the first that is not a token of the vocabulary."""
        valid = []
        for draft in drafts[:most]:
            if not 0 <= draft < self._vocab_size:
                break
            valid.append(int(draft))
        return valid
