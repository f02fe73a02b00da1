"""Text before a form: a reasoning that is open, or that the first text may open.

It is a function of the output alone, as a grammar is, so preemption and restarts change nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np

from quire.grammar.bits import mask_words

BLANKS = b" \t\r\n"
"""May stand before the text that opens a reasoning."""
MOST_BLANKS = 8
"""A model that writes nothing else would fill its budget with blanks."""


class Marks(msgspec.Struct, frozen=True):
    """Texts around what comes before a form: openings (none: it is open), and ends."""

    opening_texts: tuple[str, ...]
    ending_texts: tuple[str, ...]

    @property
    def opens(self) -> tuple[bytes, ...]:
        """The opening texts as tokens have them."""
        return tuple(text.encode() for text in self.opening_texts)

    @property
    def ends(self) -> tuple[bytes, ...]:
        """The ending texts as tokens have them."""
        return tuple(text.encode() for text in self.ending_texts)


class Stage(Enum):
    """The part of its text that an output has come to."""

    OPENING = "opening"
    """The output's text may become an opening, or be the beginning of the form."""
    INSIDE = "inside"
    """Between opening and end."""
    OVER = "over"
    """The prelude is over, and the form begins."""


PreludeState = tuple[Stage, Sequence[int]]
"""The stage, and the end of the output that counts."""


class Prelude(Protocol):
    """Follows an output up to its form."""

    stage: Stage

    def take(self, token_id: int) -> None:
        """Advance by a token."""

    def state(self) -> PreludeState:
        """Return what `return_to` needs to forget the tokens that are taken from now on."""

    def return_to(self, state: PreludeState) -> None:
        """Forget the tokens taken since `state` was asked for."""

    def restrict(self, mask: np.ndarray) -> None:
        """Restrict a mask [ceil(V/32)] int32, which is filled for the form, to what may come. While
        the output is opening, that is what the form allows, and what leads to an opening.
        """


class IdPrelude:
    """A prelude that ends after certain token ids, and is open from the beginning."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._mark = tuple(ids)
        self._tail: tuple[int, ...] = ()
        self.stage = Stage.INSIDE

    def take(self, token_id: int) -> None:
        self._tail = (*self._tail, token_id)[-len(self._mark) :]
        if self._tail == self._mark:
            self.stage = Stage.OVER

    def state(self) -> PreludeState:
        return self.stage, self._tail

    def return_to(self, state: PreludeState) -> None:
        self.stage, self._tail = state[0], tuple(state[1])

    def restrict(self, mask: np.ndarray) -> None:
        mask[:] = -1


class TextPrelude:
    """A prelude that ends with the first of some texts, and is opened by one of others or is open
    from the beginning.

    A text that ends or opens it counts when it is complete, however many tokens it has. A token
    that has the end of a prelude and more in it is not allowed: the form would lack its beginning.
    """

    def __init__(self, tokens: MarkTokens) -> None:
        self._tokens = tokens
        self._text = b""
        self.stage = Stage.OPENING if tokens.opens else Stage.INSIDE

    def take(self, token_id: int) -> None:
        self._text += self._tokens.bytes_of(token_id)
        if self.stage is Stage.OPENING:
            self._open()
        if self.stage is Stage.INSIDE:
            if self._tokens.has_end(self._text):
                self.stage = Stage.OVER
            # what a later token can still make an end of
            self._text = self._text[max(0, len(self._text) - self._tokens.longest_end) :]

    def _open(self) -> None:
        text = self._text.lstrip(BLANKS)
        marks = self._tokens.opens
        has_room = len(self._text) - len(text) <= MOST_BLANKS
        opening = next((mark for mark in marks if text.startswith(mark)), None)
        if has_room and opening is not None:
            self.stage, self._text = Stage.INSIDE, text[len(opening) :]
        # no opening any more: what has come is the beginning of the form
        elif not (has_room and any(mark.startswith(text) for mark in marks)):
            self.stage = Stage.OVER

    def state(self) -> PreludeState:
        return self.stage, self._text

    def return_to(self, state: PreludeState) -> None:
        self.stage, self._text = state[0], bytes(state[1])

    def restrict(self, mask: np.ndarray) -> None:
        if self.stage is Stage.OPENING:
            mask |= self._tokens.opening(self._text)
        else:
            mask[:] = ~self._tokens.beyond_end(self._text)


class MarkTokens:
    """Masks of tokens that matter to a prelude's marks; 50 ms to make for 150,000 tokens."""

    def __init__(self, tokens: Sequence[bytes], marks: Marks) -> None:
        self.opens = marks.opens
        self.ends = marks.ends
        self.longest_end = max(map(len, self.ends)) - 1
        """The most bytes at the end of a text that may be the beginning of an ending text."""
        self._tokens = tokens
        self._num_words = mask_words(len(tokens))
        self._sorted = sorted((token, index) for index, token in enumerate(tokens) if token)
        self._opening: dict[tuple[bytes, int], np.ndarray] = {}
        self._beyond: dict[tuple[int, ...], np.ndarray] = {}
        self._with_end = self._having_end()
        self._blank = self._starting_blank() if self.opens else []

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token adds to a text."""
        return self._tokens[token_id]

    def has_end(self, text: bytes) -> bool:
        return any(mark in text for mark in self.ends)

    def opening(self, text: bytes) -> np.ndarray:
        """Return the mask of the tokens after which a text may still become an opening, or is."""
        stem = text.lstrip(BLANKS)
        room = 0 if stem else MOST_BLANKS - len(text)
        if (stem, room) not in self._opening:
            found = [index for mark in self.opens for index in self._leading(mark, stem)]
            found += [index for index, num_blanks in self._blank if num_blanks <= room]
            self._opening[stem, room] = self._mask(found)
        return self._opening[stem, room]

    def beyond_end(self, text: bytes) -> np.ndarray:
        """Return the mask of the tokens that have the end of the prelude in them, and more."""
        known = tuple(_overlap(text, mark) for mark in self.ends)
        if known not in self._beyond:
            found = list(self._with_end)
            for mark, length in zip(self.ends, known, strict=True):
                for size in range(1, length + 1):
                    if mark[:length].endswith(mark[:size]):  # what the text may have begun instead
                        found += self._longer_than(mark[size:])
            self._beyond[known] = self._mask(found)
        return self._beyond[known]

    def _leading(self, mark: bytes, stem: bytes) -> Iterable[int]:
        """The tokens with which `stem` goes on to a mark, or up to it and beyond."""
        if not mark.startswith(stem):
            return
        rest = mark[len(stem) :]
        for size in range(1, len(rest)):
            yield from self._equal_to(rest[:size])
        for index in self._starting_with(rest):
            if not self.has_end(self._tokens[index][len(rest) :]):
                yield index

    def _starting_blank(self) -> list[tuple[int, int]]:
        """The tokens of blanks, alone or before the beginning of an opening, and their number."""
        found = []
        for blank in BLANKS:
            for index in self._starting_with(bytes([blank])):
                text = self._tokens[index].lstrip(BLANKS)
                for mark in self.opens:
                    leads = mark.startswith(text) or text.startswith(mark)
                    if leads and not self.has_end(text[len(mark) :]):
                        found.append((index, len(self._tokens[index]) - len(text)))
        return found

    def _having_end(self) -> list[int]:
        """The tokens that have an end in them, and more after it."""
        return [
            index
            for index, token in enumerate(self._tokens)
            for mark in self.ends
            if 0 <= token.find(mark) < len(token) - len(mark)
        ]

    def _equal_to(self, text: bytes) -> list[int]:
        return [i for i in self._starting_with(text) if len(self._tokens[i]) == len(text)]

    def _longer_than(self, text: bytes) -> list[int]:
        return [i for i in self._starting_with(text) if len(self._tokens[i]) > len(text)]

    def _starting_with(self, text: bytes) -> list[int]:
        start = bisect_left(self._sorted, (text, -1))
        found = []
        while start < len(self._sorted) and self._sorted[start][0].startswith(text):
            found.append(self._sorted[start][1])
            start += 1
        return found

    def _mask(self, ids: Iterable[int]) -> np.ndarray:
        bits = np.zeros(self._num_words * 32, dtype=np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def _overlap(text: bytes, mark: bytes) -> int:
    """The length of the longest part of a mark, but not all of it, that a text ends with."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
