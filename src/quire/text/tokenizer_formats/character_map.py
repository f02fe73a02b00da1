"""The table of a SentencePiece model that says how characters are normalised.

The tokenizers library reads it, too (`normalizers.Precompiled`), but gives a group of characters
that are shown as one to the shortest rule that fits, and loses what follows: the line break of
"\\r\\n", the second accent of a letter that is written with two. SentencePiece takes the longest
rule at each place, as is done here.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import NormalizedString

_MOST_RULE_BYTES = 256
_MOST_CACHED = 1 << 16
_PLACEHOLDERS = range(0xF0000, 0x10FFFE)
"""Characters for private use; of these, some that a text does not have stand for longer texts."""


@dataclass(frozen=True, slots=True)
class _Rule:
    value: str | None
    """Text that the character becomes by itself; None: it stays."""
    continues: bool
    """Whether there are rules of several characters that begin with it."""


class CharacterMap:
    """A normalizer for `tokenizers.normalizers.Normalizer.custom`."""

    def __init__(self, table: bytes) -> None:
        """`table`: the size of a double array (a trie of UTF-8), the array, and the values, each
        with a zero after it. Raises ValueError.
        """
        size = int.from_bytes(table[:4], "little")
        if size % 4 or not 0 < size <= len(table) - 4:
            raise ValueError("its table of characters has another size than it says")
        self._units = array.array("I", table[4 : 4 + size])
        if sys.byteorder == "big":
            self._units.byteswap()
        self._values = table[4 + size :]
        self._rules: dict[str, _Rule] = {}

    def normalize(self, normalized: NormalizedString) -> None:
        """Apply the rules in place, so that places in the text as it was stay known."""
        text = normalized.normalized
        characters = set(text)
        if all(self._rule(c) == _NOTHING for c in characters):
            return
        free = (chr(point) for point in _PLACEHOLDERS if chr(point) not in characters)
        names: dict[str, str] = {}
        units: list[str] = []
        for value, count in self._parts(text):
            for unit in (value, *[""] * (count - 1)):
                if len(unit) != 1 and unit not in names:
                    names[unit] = next(free)
                units.append(names.get(unit, unit))
        following = iter(units)
        normalized.map(lambda _: next(following))
        for value, name in names.items():
            normalized.replace(name, value)

    def _parts(self, text: str) -> Iterator[tuple[str, int]]:
        """Texts that stand for the next characters, each with how many of them it replaces."""
        at = 0
        while at < len(text):
            rule = self._rule(text[at])
            value, count = rule.value, 1
            if rule.continues:
                value, count = self._longest(text, at)
            yield (text[at] if value is None else value), count
            at += count

    def _longest(self, text: str, at: int) -> tuple[str | None, int]:
        data = text[at : at + _MOST_RULE_BYTES].encode()
        value, length, _ = self._walk(data[:_MOST_RULE_BYTES])
        return value, max(1, len(data[:length].decode(errors="ignore")))

    def _rule(self, character: str) -> _Rule:
        rule = self._rules.get(character)
        if rule is None:
            data = character.encode()
            value, length, end = self._walk(data)
            continues = end is not None and any(
                self._child(end, byte) is not None for byte in range(1, 256)
            )
            rule = _Rule(value if length == len(data) else None, continues)
            if len(self._rules) >= _MOST_CACHED:
                self._rules.clear()
            self._rules[character] = rule
        return rule

    def _walk(self, data: bytes) -> tuple[str | None, int, int | None]:
        """The value of the longest rule that `data` begins with, the bytes of that rule, and the
        place in the array where all of `data` ends, None where no rule is so long.
        """
        place = _offset(self._units[0])
        value: str | None = None
        length = 0
        for count, byte in enumerate(data, 1):
            unit = self._child(place, byte)
            if unit is None:
                return value, length, None
            place = place ^ byte ^ _offset(unit)
            if unit >> 8 & 1 and place < len(self._units):
                value, length = self._value(self._units[place] & 0x7FFFFFFF), count
        return value, length, place

    def _child(self, place: int, byte: int) -> int | None:
        """The unit that a byte leads to."""
        at = place ^ byte
        unit = self._units[at] if at < len(self._units) else 0
        return unit if unit & 0x800000FF == byte else None

    def _value(self, at: int) -> str:
        end = self._values.find(b"\0", at)
        return self._values[at : end if end >= 0 else None].decode(errors="replace")


_NOTHING = _Rule(None, False)


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 512) >> 6)
