"""Streamed answers: the interface to a model for the commands that ask, and their display."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

from quire.errors import CapacityError, GenerationError, RequestError

Message = dict[str, Any]

_FOR_TERMINALS: dict[int, str] = {
    **dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd"),
    ord("\r"): "",
}
"""Control characters but for tab and line end: what a model says does not steer a terminal."""

PASSING = (RequestError, CapacityError, GenerationError)
"""Errors after which the next question may be answered."""


class Piece(NamedTuple):
    """A part of an answer, of `num_tokens`; with `is_thought` it is shown and not kept."""

    text: str = ""
    num_tokens: int = 0
    is_thought: bool = False


Pieces = Generator[Piece, None, None]


class Model(Protocol):
    """A model that answers, in pieces as they are generated; closing the iterator ends it."""

    def chat(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> Pieces:
        """The next message of a conversation."""
        ...

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Pieces:
        """The continuation of a text, in pieces."""
        ...


class Answer(NamedTuple):
    """An answer that was printed: the text to keep, and whether Ctrl-C ended it."""

    text: str
    is_interrupted: bool = False


class Statistics:
    """Tokens and times of one answer.

    A server counts tokens when the answer is over; of one that is interrupted the pieces are
    counted, which are tokens as a rule.
    """

    def __init__(self) -> None:
        self._start = self._first = self._last = time.perf_counter()
        self._num_tokens = self._num_pieces = 0

    def take(self, piece: Piece) -> None:
        self._num_tokens += piece.num_tokens
        if not piece.text:
            return
        self._last = time.perf_counter()
        self._num_pieces += 1
        if self._num_pieces == 1:
            self._first = self._last

    def __str__(self) -> str:
        count = self._num_tokens or self._num_pieces
        text = f"{count} tokens" if self._num_tokens or not count else f"about {count} tokens"
        if self._num_pieces:
            text += f", the first after {self._first - self._start:.3f} s"
        if count > 1 and self._last > self._first:
            text += f", then {(count - 1) / (self._last - self._first):.1f} tokens/s"
        return text


def show(pieces: Pieces, *, stats: bool = False) -> Answer:
    """Print an answer as it comes and return it; Ctrl-C ends it early, the last line is ended in
    any case. With `stats` standard error gets a line of figures.
    """
    kept: list[str] = []
    statistics = Statistics()
    last, was_thought, is_interrupted = "", False, False
    try:
        for piece in _closing(pieces):
            statistics.take(piece)
            # a piece without text may come between, with the count of tokens
            if was_thought and not piece.is_thought and piece.text:
                _write("\n\n")
            _write(piece.text)
            last = piece.text or last
            was_thought = piece.is_thought if piece.text else was_thought
            kept.append("" if piece.is_thought else piece.text)
    except KeyboardInterrupt:
        is_interrupted = True  # what came so far is the answer
    finally:
        if is_interrupted or not last.endswith("\n"):
            _write("\n")
    if stats:
        print(f"({statistics})", file=sys.stderr)
    return Answer("".join(kept), is_interrupted)


def raise_interrupt(answer: Answer) -> None:
    """End the command by KeyboardInterrupt if Ctrl-C ended its only answer."""
    if answer.is_interrupted:
        raise KeyboardInterrupt


def go_on_after(answer: Answer) -> None:
    """At a terminal Ctrl-C ends one answer; with questions from a file or a pipe, the command."""
    if not sys.stdin.isatty():
        raise_interrupt(answer)


def _closing(pieces: Pieces) -> Pieces:
    """The same; they end when this ends."""
    with closing(pieces):
        yield from pieces


def _write(text: str) -> None:
    # a file gets the text as it is
    sys.stdout.write(text.translate(_FOR_TERMINALS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def lines(greeting: str) -> Iterator[str]:
    """The lines that the user types. At a terminal Ctrl-C discards the line."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 (its import gives input() line editing)

        print(greeting)
    while True:
        try:
            line = input("> ") if is_terminal else input()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(Ctrl-D ends the session.)")
            continue
        yield line
