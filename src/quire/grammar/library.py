"""What this folder needs of a library that makes masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from quire.errors import EngineError
from quire.grammar.source import GrammarSource


class GrammarError(EngineError):
    """A grammar cannot be compiled, or an output does not follow it; the text says why."""


_MAX_SHOWN = 300


def in_short(said: str) -> str:
    """What a library said, on one line that is fit for a reply."""
    line = " ".join(said.split())
    return line if len(line) <= _MAX_SHOWN else line[:_MAX_SHOWN] + "..."


class Matcher(Protocol):
    """How far one text has come in its grammar."""

    @property
    def library(self) -> GrammarLibrary:
        """Who fills its masks."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens. Raises GrammarError if they are not allowed."""

    @property
    def failure(self) -> str | None:
        """What went wrong, from which on the matcher is of no more use; None: nothing."""

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete and nothing may follow it."""


class Form(Protocol):
    """A compiled grammar. Matchers may be taken from it by one thread at a time."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""


class GrammarLibrary(Protocol):
    """Compiles sources for one vocabulary. Nothing here limits time: a form was tried before
    (trial.py).
    """

    @staticmethod
    def takes(source: GrammarSource) -> bool:
        """Whether it enforces all of the form."""

    def compile(self, source: GrammarSource) -> Form:
        """Raises GrammarError for a source that is wrong, too large, or that nothing matches."""

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: np.ndarray) -> None:
        """Write the mask of each of its matchers into its row of masks [G, ceil(V/32)] int32.

        A matcher that fails says so in `failure`. Raises GrammarError where it cannot be told which
        one failed.
        """
