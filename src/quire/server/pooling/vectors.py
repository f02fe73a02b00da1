"""Vectors as bytes: number formats, byte orders, and signs as bits."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from quire.errors import InvalidParameter
from quire.server.pooling.requests import DType, Endianness

Array = np.ndarray[Any, Any]

ITEM_BYTES: dict[DType, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


def as_bytes(numbers: Array, dtype: DType, endianness: Endianness) -> bytes:
    """fp32 numbers of any shape as bytes of `dtype`, each rounded to the nearest (ties to even)."""
    if dtype == "float32":
        items = np.ascontiguousarray(numbers, dtype=np.float32)
    elif dtype == "float16":
        with np.errstate(over="ignore"):  # to infinity, as everywhere
            items = numbers.astype(np.float16)
    elif dtype == "bfloat16":
        items = _bfloat16(numbers)
    else:
        return _fp8(numbers, _E4M3 if dtype == "fp8_e4m3" else _E5M2).tobytes()
    wanted = sys.byteorder if endianness == "native" else endianness
    return (items if wanted == sys.byteorder else items.byteswap()).tobytes()


def _bfloat16(numbers: Array) -> Array:
    """The upper halves of the numbers, rounded; the numbers are finite."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    # adding half of the last kept place, less one where that place is even, rounds ties to even
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _values(num_mantissa_bits: int, bias: int) -> Array:
    """Values of codes 0..127 of an 8-bit float, infinity and NaN as if they were numbers."""
    codes = np.arange(128)
    exponent, mantissa = codes >> num_mantissa_bits, codes & (2**num_mantissa_bits - 1)
    fraction = mantissa / 2.0**num_mantissa_bits
    scale = 2.0 ** (np.maximum(exponent, 1) - bias)
    values: Array = np.where(exponent == 0, fraction, 1 + fraction) * scale
    return values


_E4M3 = _values(3, 7)[:127]
"""Numbers without infinities (Micikevicius et al. 2022): what is larger becomes 448."""
_E5M2 = _values(2, 15)[:125]
"""The code after 57344 is infinity, and the last one here."""


def _fp8(numbers: Array, values: Array) -> Array:
    """The codes of the nearest values."""
    sizes = np.abs(numbers.astype(np.float64))
    # both neighbours exist even for the smallest and the largest
    above = np.clip(np.searchsorted(values, sizes), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    # of two equally near codes the even one, whose last mantissa bit is 0
    is_high = (sizes - low > high - sizes) | ((sizes - low == high - sizes) & (above % 2 == 0))
    codes = np.where(is_high, above, above - 1).astype(np.uint8)
    return codes | (np.signbit(numbers).astype(np.uint8) << 7)


def sign_bits(numbers: Array) -> Array:
    """Bits of numbers [D], 1 where they are 0 or more, in bytes [D / 8], the first bit the highest.
    Raises InvalidParameter where D is not a multiple of 8.
    """
    if numbers.shape[-1] % 8:
        allowed = f"vectors of {numbers.shape[-1]} numbers are not whole bytes of bits"
        raise InvalidParameter("embedding_types", "binary", allowed)
    return np.packbits(numbers >= 0)
