"""The choice of which objects are closed."""

from __future__ import annotations

from enum import Enum


class Openness(Enum):
    """The objects that may have properties that are not declared, where the schema does not say."""

    CLOSED = "closed"
    """Objects that declare none at all."""
    OPEN = "open"
    """All objects, as in the standard."""
    SHUT = "shut"
    """No object."""
