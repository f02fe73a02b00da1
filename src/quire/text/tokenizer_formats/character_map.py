"""The table of a SentencePiece model that says how characters are normalised.

The tokenizers library reads it, too (`normalizers.Precompiled`), but gives a group of characters
that are shown as one to the shortest rule that fits, and loses what follows: the line break of
"\\r\\n", the second accent of a letter that is written with two. SentencePiece takes the longest
rule at each place, as is done here.
"""

from __future__ import annotations

import array
import re
import sys
from dataclasses import dataclass
from functools import partial

from tokenizers import NormalizedString

_MOST_RULE_BYTES = 256
_MOST_CACHED = 1 << 16
_FIRST_MARK = 0xE000
_BLANK = " "


@dataclass(frozen=True, slots=True)
class _Rule:
    value: str | None
    """Text that the character becomes by itself; None: it stays."""
    continues: bool
    """Whether there are rules of several characters that begin with it."""


class CharacterMap:
    """A normalizer for `tokenizers.normalizers.Normalizer.custom`.

    Python looks only at characters with which a rule may begin; the rest is a constant number of
    passes of the library over the text, and one more for each length of the values in it.
    """

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
        self._pairs: dict[str, bool] = {}

    def normalize(self, normalized: NormalizedString) -> None:
        """Apply the rules in place, so that places in the text as it was stay known."""
        text = normalized.normalized
        units = self._units_of(text)
        if units is None:
            return
        lengths = {len(unit) for unit in units} - {1}
        if lengths:
            # Make room first: each character becomes a blank or a mark of its value's length, and
            # each mark that many blanks. Then every blank becomes its character.
            marks = {length: chr(_FIRST_MARK + at) for at, length in enumerate(sorted(lengths))}
            _set_characters(normalized, [marks.get(len(unit), _BLANK) for unit in units])
            for length, mark in marks.items():
                normalized.replace(mark, _BLANK * length)
        _set_characters(normalized, "".join(units))

    def _units_of(self, text: str) -> list[str] | None:
        """The text that each character becomes; of several with one rule, the first becomes all.
        None where no rule fits.
        """
        first = {c for c in set(text) if self._rule(c).value is not None}
        first |= {c for c, after in {*zip(text, text[1:], strict=False)} if self._goes_on(c, after)}
        if not first:
            return None
        units = list(text)
        end, is_changed = 0, False
        for match in re.finditer(f"[{re.escape(''.join(sorted(first)))}]", text):
            at = match.start()
            if at < end:
                continue
            rule = self._rule(match[0])
            value, end = rule.value, at + 1
            if rule.continues:
                value, end = self._longest(text, at)
            if value is not None:
                units[at:end] = (value, *[""] * (end - at - 1))
                is_changed = True
        return units if is_changed else None

    def _longest(self, text: str, at: int) -> tuple[str | None, int]:
        """The value of the longest rule at a place, and where what it replaces ends."""
        data = text[at : at + _MOST_RULE_BYTES].encode()
        value, length, _ = self._walk(data[:_MOST_RULE_BYTES])
        return value, at + max(1, len(data[:length].decode(errors="ignore")))

    def _goes_on(self, character: str, after: str) -> bool:
        """Whether there are rules that begin with both characters."""
        if not self._rule(character).continues:
            return False
        found = self._pairs.get(character + after)
        if found is None:
            *_, end = self._walk((character + after).encode())
            found = end is not None
            if len(self._pairs) >= _MOST_CACHED:
                self._pairs.clear()
            self._pairs[character + after] = found
        return found

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


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 512) >> 6)


def _set_characters(normalized: NormalizedString, characters: str | list[str]) -> None:
    """Give each character of the text that of `characters` in its place."""
    normalized.map(partial(next, iter(characters)))
