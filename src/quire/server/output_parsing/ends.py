"""Reasons for a reader to stop, which all of them return."""

from __future__ import annotations

from enum import Enum, auto


class End(Enum):
    """Reason for a reader to stop without having met a delimiter."""

    MORE = auto()
    """The reader's input is used up, or may be the beginning of something."""
    DONE = auto()
    """The thing that it reads is complete."""
    MISFIT = auto()
    """The text is not what it reads; what it took so far belongs to the text around."""


Outcome = End | str
"""An End, or the delimiter that was met."""
