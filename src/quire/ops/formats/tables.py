"""The sixteen numbers of types of four bits that are not whole numbers."""

from __future__ import annotations

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E2M1 = _SIZES + tuple(-size for size in _SIZES)
"""Numbers of a float with two bits of exponent and one of mantissa (OCP Microscaling Formats
v1.0).
"""
