"""The interface to libraries that make masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from quire.errors import EngineError
from quire.grammar.source import LoweredSource


class GrammarError(EngineError):
    """A grammar cannot be compiled, or an output does not follow it; the text says why."""


_MAX_SHOWN = 300


def in_short(message: str) -> str:
    """A library's message on one line that is fit for a reply."""
    line = " ".join(message.split())
    return line if len(line) <= _MAX_SHOWN else line[:_MAX_SHOWN] + "..."


class Matcher(Protocol):
    """The state of one text in its grammar."""

    @property
    def library(self) -> GrammarLibrary:
        """The library that fills its masks."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens. Raises GrammarError if they are not allowed."""

    def try_token(self, token_id: int) -> bool:
        """Advance by a token if it is allowed -> whether it is. Raises GrammarError on failure."""

    def roll_back(self, count: int) -> None:
        """Undo the last `count` tokens. Raises GrammarError for a failure of the library."""

    @property
    def failure(self) -> str | None:
        """The error after which the matcher can no longer be used; None without an error."""

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete and nothing may follow it."""


class Form(Protocol):
    """A compiled grammar. Matchers may be taken from it by one thread at a time.

    `unenforced`: pointers to the keywords of its schemas that are annotations.
    """

    unenforced: tuple[str, ...]

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""


class GrammarLibrary(Protocol):
    """Compiles lowered sources for one vocabulary, without a limit of time: see trial.py."""

    @staticmethod
    def takes(source: LoweredSource) -> bool:
        """Whether it enforces all of the form."""

    def compile(self, source: LoweredSource) -> Form:
        """Compile a source. Raises GrammarError if it is invalid, too large, or matches nothing."""

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: np.ndarray) -> None:
        """Write the mask of each of its matchers into its row of masks [G, ceil(V/32)] int32.

        A matcher that fails has an error in `failure`. Raises GrammarError if it is unknown which
        one failed.
        """
