"""Numbers with a bound of how far a provider's may be from them: a running error analysis.

Each operation adds what its operands' errors make of its result, to first order, and the rounding
of the result itself (Wilkinson 1963; Higham 2002, Accuracy and Stability of Numerical Algorithms,
sections 2.2 and 3.3). Errors are counted in units of the roundoff of the type that sums run in:
2**-24 for float32. Rounding to a shorter type is `Stored`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.ops.registry import WIDE
from tests.support.op_oracle_rows import Array, to_array

DIVISION = 4.0
"""Units of a quotient or a root: a GPU's fast ones are right to two ulps, not to half of one (PTX
ISA, div.full)."""

FUNCTION = 8.0
"""Units of an exponential, a logarithm, a hyperbolic tangent and what is made of them: four ulps,
which libraries of vector functions promise."""

DEVIATIONS = 4.0
"""A sum of n roundings of random sign exceeds this many times the square root of n with a
probability of at most 2 exp(-8) if all were as large as can be (Higham and Mary 2019, A New
Approach to Probabilistic Rounding Error Analysis, theorem 2.4); with sizes that are spread evenly
it is seven standard deviations."""


def growth(count: int) -> float:
    """Units of each term in the error of a sum of `count` products, in whatever order they are
    added: one for each rounding on its way, or for long sums what `DEVIATIONS` allow.
    """
    return min(count, DEVIATIONS * count**0.5)


@dataclass(frozen=True)
class Approx:
    """Exact values and bounds of their errors in units, of one shape."""

    value: Array
    error: Array

    @staticmethod
    def exact(x: Any) -> Approx:
        """A tensor or an array of numbers that every provider is given."""
        value = np.asarray(to_array(x), dtype=np.float64)
        return Approx(value, np.zeros_like(value))

    @property
    def size(self) -> Array:
        """Magnitudes."""
        return np.abs(self.value)

    def __getitem__(self, at: Any) -> Approx:
        return Approx(self.value[at], self.error[at])

    def reshape(self, *shape: int) -> Approx:
        return Approx(self.value.reshape(shape), self.error.reshape(shape))

    def __add__(self, other: Approx | float) -> Approx:
        b = _approx(other)
        value = self.value + b.value
        return Approx(value, self.error + b.error + np.abs(value))

    def __sub__(self, other: Approx) -> Approx:
        return self + Approx(-other.value, other.error)

    def __mul__(self, other: Approx | float) -> Approx:
        b = _approx(other)
        value = self.value * b.value
        return Approx(value, self.size * b.error + self.error * b.size + np.abs(value))

    def __truediv__(self, other: Approx | float) -> Approx:
        b = _approx(other)
        value = self.value / b.value
        inherited = (self.error + np.abs(value) * b.error) / b.size
        return Approx(value, inherited + DIVISION * np.abs(value))

    def sum(self) -> Approx:
        """Over the last axis, which stays with the size 1."""
        count = self.value.shape[-1]
        error = (self.error + growth(count) * self.size).sum(-1, keepdims=True)
        return Approx(self.value.sum(-1, keepdims=True), error)

    def mean(self) -> Approx:
        """Over the last axis, which stays with the size 1."""
        return self.sum() / float(self.value.shape[-1])

    def max(self) -> Approx:
        """Over the last axis, which stays with the size 1."""
        error = self.error.max(-1, keepdims=True)
        return Approx(self.value.max(-1, keepdims=True), error)


def _approx(x: Approx | float) -> Approx:
    return x if isinstance(x, Approx) else Approx.exact(x)


def join(rows: Sequence[Approx], width: int) -> Approx:
    """Rows [1, width] as one matrix."""
    none = np.zeros((0, width))
    return Approx(
        np.concatenate([none, *(row.value for row in rows)]),
        np.concatenate([none, *(row.error for row in rows)]),
    )


def contract(subscripts: str, a: Approx, b: Approx, count: int) -> Approx:
    """`numpy.einsum`, whose sums have `count` products each."""
    product: Callable[[Array, Array], Array] = lambda x, y: np.einsum(subscripts, x, y)  # noqa: E731
    error = product(a.size, growth(count) * b.size + b.error) + product(a.error, b.size)
    return Approx(product(a.value, b.value), error)


def sqrt(x: Approx) -> Approx:
    value = np.sqrt(x.value)
    return Approx(value, x.error / (2 * value) + DIVISION * value)


def exp(x: Approx) -> Approx:
    """Exponentials. As powers of 2 their argument is rounded once more."""
    value = np.exp(x.value)
    is_zero = np.isneginf(x.value)
    argument = x.error + np.where(is_zero, 0.0, x.size) + FUNCTION
    return Approx(value, value * argument)


def log(x: Approx) -> Approx:
    value = np.log(x.value)
    return Approx(value, x.error / x.size + FUNCTION * np.abs(value))


def tanh(x: Approx) -> Approx:
    """Hyperbolic tangents; from an exponential that is close to 1 only their absolute error is
    small.
    """
    value = np.tanh(x.value)
    return Approx(value, (1 - value**2) * x.error + FUNCTION)


def sigmoid(x: Approx) -> Approx:
    value = 1 / (1 + np.exp(-x.value))
    return Approx(value, value * ((1 - value) * (x.error + x.size) + FUNCTION))


def softmax(x: Approx) -> Approx:
    """Over the last axis."""
    powers = exp(x - Approx.exact(x.value.max(-1, keepdims=True)))  # whatever is taken off cancels
    return powers / powers.sum()


class Stored:
    """Rounding to a dtype; `unit` is the roundoff of the type that sums of this dtype run in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.unit = _roundoff(WIDE[dtype])
        self._relative = _roundoff(dtype) / self.unit
        # half the distance of numbers below the smallest normal one
        self._absolute = torch.finfo(dtype).smallest_normal * self._relative

    def __call__(self, x: Approx) -> Approx:
        """x rounded, from wherever it is."""
        largest = x.size + self.unit * x.error
        return Approx(x.value, x.error + self._relative * largest + self._absolute)


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
