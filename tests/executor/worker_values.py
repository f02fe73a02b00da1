"""A worker extension whose results and errors are hard to send: `Values`."""

import numpy as np

from quire.errors import RequestError

HALF = "a\udc80b"
"""A text with a lone surrogate."""


def deep(levels):
    found = 0
    for _ in range(levels):
        found = [found]
    return found


def cyclic():
    found = []
    found.append(found)
    return found


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self):
        raise LookupError("no text")


VALUES = {
    "an int of 71 bits": lambda: 2**70,
    "a key of 71 bits": lambda: {2**70: 1},
    "a list in itself": cyclic,
    "900 levels": lambda: deep(900),
    "5000 levels": lambda: deep(5000),
    "an object": object,
    "a lone surrogate": lambda: {HALF: [HALF]},
    "arrays": lambda: [np.full(100, i) for i in range(3000)],
    "a pair as key": lambda: {(1, 2): 3},
    "60 levels": lambda: deep(60),
}
ERRORS = {
    "a lone surrogate": lambda: ValueError(HALF),
    "ours, a lone surrogate": lambda: RequestError(HALF),
    "no text": Mute,
    "a megabyte": lambda: ValueError("x" * 2**20),
    "the end of the program": lambda: SystemExit(3),
}


class Values:
    def give(self, kind):
        return VALUES[kind]()

    def fail(self, kind):
        raise ERRORS[kind]()
