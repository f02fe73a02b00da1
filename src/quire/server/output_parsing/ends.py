"""How a reader of text stops: the one word that all of them give back."""

from __future__ import annotations

from enum import Enum, auto


class End(Enum):
    """Why a reader gave the text back without having met a delimiter."""

    MORE = auto()
    """What it was given is used up, or may be the beginning of something."""
    DONE = auto()
    """What it reads is complete."""
    MISFIT = auto()
    """The text is not what it reads; what it took so far belongs to the text around."""


Outcome = End | str
"""An End, or the delimiter that was met."""
