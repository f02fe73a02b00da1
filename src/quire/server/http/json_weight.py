"""Bounds the work of decoding a body, before it is decoded.

The decoder holds the interpreter for the whole of a body, and 30 MB can be ten million objects (a
second and a gigabyte) or numbers such as 1e300, which take it 30 µs each (minutes). Texts cost it
next to nothing, so only what is outside of strings is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from quire.server.http.failures import Refusal

LIGHT_BYTES = 8192
"""No body of this size holds up others, whatever is in it."""
MOST_VALUES = 2**20
MOST_CONTAINERS = 2**15
_FIELDS_OF_A_CONTAINER = 2
MOST_EXPONENTS = 2000
MOST_LONG_RUNS = 10_000

_CHUNK = 1 << 16
_RUN = re.compile(rb"[0-9]{40}")
_FEW_DIGITS = 2**19
_DIGITS = b"0123456789"


def check_weight(data: bytes, most_containers: int = MOST_CONTAINERS) -> None:
    """Raise Refusal (400) for JSON with more values, objects and arrays, fields, or slowly decoded
    numbers than a request may have. Takes some 5 ns a byte, and never holds the interpreter for
    long.
    """
    num_values = num_containers = num_fields = num_exponents = num_digits = num_runs = 0
    for outside in _outside_of_strings(data):
        opened = outside.count(b"{") + outside.count(b"[")
        num_containers += opened
        num_values += opened + outside.count(b",")
        num_fields += outside.count(b":")
        num_exponents += _exponents(outside)
        num_digits += len(outside) - len(outside.translate(None, _DIGITS))
        # fewer digits cannot make many more runs than are allowed, so the search is left out
        if num_digits > _FEW_DIGITS:
            num_runs += len(_RUN.findall(outside))
        _refuse_above(MOST_VALUES, num_values, "values")
        _refuse_above(most_containers, num_containers, "objects and arrays")
        _refuse_above(_FIELDS_OF_A_CONTAINER * most_containers, num_fields, "fields")
        _refuse_above(MOST_EXPONENTS, num_exponents, "numbers with an exponent")
        _refuse_above(MOST_LONG_RUNS, num_runs, "numbers of very many digits")


def _exponents(outside: bytes) -> int:
    """Every e, less those of the literals, and those of text that is not JSON."""
    literals = outside.count(b"true") + outside.count(b"false")
    return outside.count(b"e") + outside.count(b"E") - literals


def _refuse_above(most: int, found: int, what: str) -> None:
    if found > most:
        raise Refusal(400, f"The body has more than {most} {what}; send less in one request.")


def _outside_of_strings(data: bytes) -> Iterator[bytes]:
    """The bytes outside of strings in each chunk of `data`, with a quote for each string."""
    is_inside = place = 0
    while place < len(data):
        chunk = data[place : place + _CHUNK]
        place += len(chunk)
        run = len(chunk) - len(chunk.rstrip(b"\\"))
        if run % 2 and place < len(data):  # the last backslash belongs to the next character
            chunk, place = chunk[:-1], place - 1
        # escaped backslashes first, so that the quote after a pair of them ends the string
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'"'.join(parts[is_inside::2])
        is_inside ^= (len(parts) - 1) & 1
