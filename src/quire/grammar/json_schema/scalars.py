"""Joins what several schemas say of strings, and of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from quire.grammar.json_schema.nodes import Bound, Number, Text, as_decimal

_Keywords = Mapping[str, Any]


def joint_counts(
    schemas: Sequence[_Keywords], least: str, most: str
) -> tuple[int, int | None] | None:
    """The fewest and most that all schemas allow by two keywords; None: a contradiction."""
    low = max((int(own[least]) for own in schemas if least in own), default=0)
    high = min((int(own[most]) for own in schemas if most in own), default=None)
    return None if high is not None and low > high else (low, high)


def text_part(schemas: Sequence[_Keywords]) -> Text | None:
    """The strings that follow all schemas; None: there are none."""
    if (lengths := joint_counts(schemas, "minLength", "maxLength")) is None:
        return None
    patterns: dict[str, None] = {}
    formats: dict[str, None] = {}
    for own in schemas:
        patterns.update(dict.fromkeys([own["pattern"]] if "pattern" in own else ()))
        formats.update(dict.fromkeys([own["format"]] if "format" in own else ()))
    return Text(*lengths, tuple(patterns), tuple(formats))


def number_part(schemas: Iterable[_Keywords], is_integer: bool) -> Number | None:
    """The numbers that follow all schemas, or None; ends of ranges of integers are included."""
    lows: list[Bound] = []
    highs: list[Bound] = []
    multiple: Fraction | None = None
    for own in schemas:
        lows += _bounds(own, "minimum", "exclusiveMinimum")
        highs += _bounds(own, "maximum", "exclusiveMaximum")
        if "multipleOf" in own:
            each = Fraction(as_decimal(own["multipleOf"]))
            multiple = each if multiple is None else _joint_multiple(multiple, each)
    # of equal bounds the open one is stricter
    low = max(lows, key=lambda bound: (bound.value, bound.is_open), default=None)
    high = min(highs, key=lambda bound: (bound.value, not bound.is_open), default=None)
    if is_integer:
        low = None if low is None else Bound(_next_integer(low, 1))
        high = None if high is None else Bound(_next_integer(high, -1))
        if multiple is not None:
            # an integer that is a multiple of n/d, in lowest terms, is one of n
            multiple = Fraction(multiple.numerator) if multiple.numerator > 1 else None
    part = Number(is_integer, low, high, multiple)
    return None if _is_empty(part) else part


def _bounds(own: _Keywords, inclusive: str, exclusive: str) -> Sequence[Bound]:
    found = []
    other = own.get(exclusive)
    if inclusive in own:
        found.append(Bound(as_decimal(own[inclusive]), other is True))
    if other is not None and not isinstance(other, bool):
        found.append(Bound(as_decimal(other), is_open=True))
    return found


def _next_integer(bound: Bound, direction: int) -> Decimal:
    """The first integer of a range from one of its ends on."""
    fraction = Fraction(bound.value)
    nearest = math.ceil(fraction) if direction > 0 else math.floor(fraction)
    return Decimal(nearest + direction if bound.is_open and nearest == fraction else nearest)


def _joint_multiple(one: Fraction, other: Fraction) -> Fraction:
    numerator = math.lcm(one.numerator * other.denominator, other.numerator * one.denominator)
    return Fraction(numerator, one.denominator * other.denominator)


def _is_empty(part: Number) -> bool:
    low, high, multiple = part.low, part.high, part.multiple
    if low is None or high is None:
        return False
    if multiple is None:
        return low.value > high.value or (low.value == high.value and (low.is_open or high.is_open))
    first, last = Fraction(low.value) / multiple, Fraction(high.value) / multiple
    lowest, highest = math.ceil(first), math.floor(last)
    lowest += low.is_open and lowest == first
    highest -= high.is_open and highest == last
    return lowest > highest
