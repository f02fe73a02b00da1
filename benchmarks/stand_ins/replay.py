"""A drafter that knows the answers: it replays recorded outputs and spoils some of their tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from quire.runner.devices.device import Array
from quire.runner.drafting.drafter import Drafter, VerifiedStep
from quire.runner.drafting.pace import Pace
from quire.runner.rows import Rows
from quire.step.plan import NewRow


class ReplayDrafter:
    """Drafts the recorded output of a prompt, each token wrong with the probability `error`.

    A network of random weights is never right: its drafts are made, which takes the time that it
    takes, and replaced.
    """

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        error: float,
        vocab_size: int,
        network: Drafter | None = None,
    ) -> None:
        self._answers = answers
        self._error = error
        self._vocab_size = vocab_size
        self._network = network
        self._random = random.Random(0)
        self._rows: dict[int, tuple[Sequence[int], int]] = {}
        """Each row's answer, and how many tokens its prompt has."""

    def add_row(self, new: NewRow) -> None:
        prompt = tuple(new.token_ids[: new.num_prompt_tokens])
        self._rows[new.row] = self._answers.get(prompt, ()), len(prompt)
        if self._network is not None:
            self._network.add_row(new)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)
        if self._network is not None:
            self._network.remove_row(row)

    def propose(self, rows: Rows, step: VerifiedStep) -> list[int]:
        counts, limits = [], step.limits
        if self._network is not None:
            limits = self._network.propose(rows, step)
        for row, most in zip(step.sampled, limits, strict=True):
            answer, start = self._rows.get(row, ((), 0))
            done = int(rows.num_tokens[row]) - start
            drafts = [self._spoiled(token) for token in answer[done : done + most]]
            if drafts:
                rows.write_drafts(row, drafts)
            counts.append(len(drafts))
        return counts

    def _spoiled(self, token: int) -> int:
        return (token + (self._random.random() < self._error)) % self._vocab_size


class Watched:
    """A pace whose notes are kept: drafts and accepted ones, and times of steps by their tokens."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.verified: list[tuple[int, int]] = []
        """(drafts, accepted) of each row that verified some, step by step."""
        self.seconds: dict[int, list[float]] = {}
        self.drafting: dict[int, list[float]] = {}
        """Times of making drafts by the most that were wanted of a row."""

    def limits(self, rows: Sequence[int], longest: Sequence[int]) -> list[int]:
        return self._pace.limits(rows, longest)

    def note_accepted(self, rows: Sequence[int], drafts: Array, accepted: Array) -> None:
        self.verified += [
            (d, a) for d, a in zip(drafts.tolist(), accepted.tolist(), strict=True) if d
        ]
        self._pace.note_accepted(rows, drafts, accepted)

    def note_time(self, num_tokens: int, seconds: float) -> None:
        self.seconds.setdefault(num_tokens, []).append(seconds)
        self._pace.note_time(num_tokens, seconds)

    def note_drafting(self, num_passes: int, seconds: float) -> None:
        self.drafting.setdefault(num_passes, []).append(seconds)
        self._pace.note_drafting(num_passes, seconds)

    def forget(self, row: int) -> None:
        self._pace.forget(row)
