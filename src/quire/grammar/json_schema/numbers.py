"""Ranges of numbers as regular expressions of any precision.

llguidance computes with floats: from 2^53 on its bounds are other numbers, and ends that do not
belong to a range do where both have the same integer part.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

from quire.grammar.json_schema.nodes import Bound, Number

EXACT_INTEGER = 2**53
"""Bound up to which every integer is a float."""
_EXACT_DIGITS = 15
_MOST_MULTIPLE = 2**32 - 1
_MOST_DECIMALS = 20
_ANY_FRACTION = r"(\.[0-9]+)?"


def is_exact_for_library(part: Number) -> bool:
    """Whether llguidance reads the range, given by its bounds, as it is."""
    low, high = part.low, part.high
    bounds = [bound for bound in (low, high) if bound is not None]
    if part.is_integer:
        return all(abs(bound.value) <= EXACT_INTEGER for bound in bounds)
    if not all(is_exact_float(bound.value) for bound in bounds):
        return False
    is_short = low is not None and high is not None and int(low.value) == int(high.value)
    return not (is_short and any(bound.is_open for bound in bounds))


def is_exact_float(value: Decimal) -> bool:
    """Whether every reader of floats gets the value that is written."""
    digits = value.normalize().as_tuple().digits
    return len(digits) <= _EXACT_DIGITS and abs(value.adjusted()) <= _EXACT_DIGITS


def unsupported(part: Number) -> str | None:
    """The reason that masks cannot enforce a range; None: they can."""
    if part.multiple is None:
        return None
    if not _is_exact_multiple(part.multiple):
        return f"multiples of {decimal_of(part.multiple)} cannot be enforced exactly"
    if not is_exact_for_library(part):
        return "multipleOf cannot be enforced together with bounds of so many digits"
    return None


def _is_exact_multiple(multiple: Fraction) -> bool:
    value, decimals = float(multiple), 0
    while value % 1 and decimals < _MOST_DECIMALS:
        value, decimals = value * 10, decimals + 1
    is_whole = value % 1 == 0 and value <= _MOST_MULTIPLE
    return is_whole and Fraction(int(value), 10**decimals) == multiple


def decimal_of(value: Fraction) -> Decimal:
    """The decimal number nearest to a fraction."""
    return Decimal(value.numerator) / Decimal(value.denominator)


def range_patterns(part: Number) -> list[str]:
    """The regular expressions that all match the numbers of a range, and together no others."""
    fraction = "" if part.is_integer else _ANY_FRACTION
    if part.low is None and part.high is None:
        # with a bound there is no exponent, by which a short text could be any number
        exponent = "" if part.is_integer else r"([eE][+-]?[0-9]+)?"
        return [f"-?(0|[1-9][0-9]*){fraction}{exponent}"]
    found = []
    if part.low is not None:
        found.append(_at_least(part.low, fraction))
    if part.high is not None:
        found.append(_at_most(part.high, fraction))
    return found


def _at_least(low: Bound, fraction: str) -> str:
    if low.value > 0 or (low.value == 0 and low.is_open):
        return _from(low.value, low.is_open, fraction)
    anything = f"(0|[1-9][0-9]*){fraction}"
    return f"({anything}|-({_up_to(-low.value, low.is_open, fraction)}))"


def _at_most(high: Bound, fraction: str) -> str:
    if high.value < 0 or (high.value == 0 and high.is_open):
        return f"-({_from(-high.value, high.is_open, fraction)})"
    return f"({_up_to(high.value, high.is_open, fraction)}|-(0|[1-9][0-9]*){fraction})"


def _from(value: Decimal, is_open: bool, fraction: str) -> str:
    """The numbers without a sign from `value` on, which is not negative."""
    whole, decimals = _digits(value)
    options = [longer + fraction for longer in _integers_above(whole)]
    if not fraction:
        options += [] if is_open else [whole]
    elif decimals:
        options.append(rf"{whole}\.({_fractions_from(decimals, is_open)})")
    else:
        options.append(whole + (r"\.[0-9]*[1-9][0-9]*" if is_open else fraction))
    return "|".join(options)


def _up_to(value: Decimal, is_open: bool, fraction: str) -> str:
    """The numbers without a sign up to `value`, which is not negative."""
    whole, decimals = _digits(value)
    options = [shorter + fraction for shorter in _integers_below(whole)]
    if decimals:
        options.append(rf"{whole}(\.({_fractions_up_to(decimals, is_open)}))?")
    elif not is_open:
        options.append(whole + (r"(\.0+)?" if fraction else ""))
    # a set without a character: no number is below 0 without a sign
    return "|".join(options) or "[^\\x00-\\U0010ffff]"


def _digits(value: Decimal) -> tuple[str, str]:
    """The digits before and after the point, without zeros at the end."""
    whole, _, decimals = format(abs(value), "f").partition(".")
    return whole, decimals.rstrip("0")


def _integers_above(whole: str) -> list[str]:
    if whole == "0":
        return ["[1-9][0-9]*"]
    found = [f"[1-9][0-9]{{{len(whole)},}}"]
    for index, digit in enumerate(whole):
        if digit != "9":
            found.append(f"{whole[:index]}[{int(digit) + 1}-9][0-9]{{{len(whole) - index - 1}}}")
    return found


def _integers_below(whole: str) -> list[str]:
    if whole == "0":
        return []
    found = ["0"]
    if len(whole) > 1:
        found.append(f"[1-9][0-9]{{0,{len(whole) - 2}}}")
    for index, digit in enumerate(whole):
        least = 1 if index == 0 else 0
        if int(digit) > least:
            rest = len(whole) - index - 1
            found.append(f"{whole[:index]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return found


def _fractions_from(decimals: str, is_open: bool) -> str:
    found = [decimals + ("[0-9]*[1-9][0-9]*" if is_open else "[0-9]*")]
    for index, digit in enumerate(decimals):
        if digit != "9":
            found.append(f"{decimals[:index]}[{int(digit) + 1}-9][0-9]*")
    return "|".join(found)


def _fractions_up_to(decimals: str, is_open: bool) -> str:
    found = [] if is_open else [decimals + "0*"]
    for index, digit in enumerate(decimals):
        if digit != "0":
            found.append(f"{decimals[:index]}[0-{int(digit) - 1}][0-9]*")
        if index:
            found.append(decimals[:index])
    return "|".join(found)
