"""Streamed answers: the interface to a model for the commands that ask, and their display."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

from quire.errors import CapacityError, GenerationError, RequestError

Message = dict[str, str]

_FOR_TERMINALS: dict[int, str] = {
    **dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd"),
    ord("\r"): "",
}
"""Control characters but for tab and line end: what a model says does not steer a terminal."""

PASSING = (RequestError, CapacityError, GenerationError)
"""Errors after which the next question may be answered."""


class Piece(NamedTuple):
    """A part of an answer. `num_tokens`: how many it adds to the count; `is_thought`: reasoning
    that is shown and not kept.
    """

    text: str = ""
    num_tokens: int = 0
    is_thought: bool = False


Pieces = Generator[Piece, None, None]


class Model(Protocol):
    """A model that answers. The pieces of an answer are yielded as they are generated; closing the
    iterator ends the generation.
    """

    def chat(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> Pieces:
        """The next message of a conversation."""
        ...

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Pieces:
        """What follows a text."""
        ...


def show(pieces: Pieces, *, stats: bool = False) -> str:
    """Print an answer as it comes and give its text; Ctrl-C ends it early, the last line is ended
    in any case. With `stats` standard error gets a line of figures.
    """
    kept: list[str] = []
    start = time.perf_counter()
    first, num_tokens, last = start, 0, ""
    was_thought = False
    try:
        for piece in _closing(pieces):
            if was_thought and not piece.is_thought and piece.text:
                _write("\n\n")
            if first == start and piece.text:
                first = time.perf_counter()
            _write(piece.text)
            num_tokens += piece.num_tokens
            last = piece.text or last
            was_thought = piece.is_thought if piece.text else was_thought
            kept.append("" if piece.is_thought else piece.text)
    except KeyboardInterrupt:
        pass  # what came so far is the answer
    finally:
        if not last.endswith("\n"):
            _write("\n")
    if stats:
        _print_stats(start, first, time.perf_counter(), num_tokens)
    return "".join(kept)


def _closing(pieces: Pieces) -> Pieces:
    """The same; they end when this ends."""
    with closing(pieces):
        yield from pieces


def _write(text: str) -> None:
    sys.stdout.write(text.translate(_FOR_TERMINALS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _print_stats(start: float, first: float, end: float, num_tokens: int) -> None:
    rate = f", then {(num_tokens - 1) / (end - first):.1f} tokens/s" if num_tokens > 1 else ""
    text = f"{num_tokens} tokens, the first after {first - start:.3f} s{rate}"
    print(f"({text})", file=sys.stderr)


def lines(greeting: str) -> Iterator[str]:
    """What the user types, until the input ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 (its import gives input() line editing)

        print(greeting)
    while True:
        try:
            yield input("> ") if is_terminal else input()
        except EOFError:
            return
