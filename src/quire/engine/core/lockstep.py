"""The rounds that cores which share experts make together, as seen by one core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LockStep(Protocol):
    """One core's side of the rounds, implemented in distributed/expert_exchange.py.

    A step that runs tokens makes its rounds itself: one, or several if it is run again in parts.
    All methods raise PeersLost when another core is gone.
    """

    num_rounds: int
    """The number of rounds begun, including those that ended a wave at once."""
    is_ending: bool
    """Set when this core is to shut down."""
    all_end: bool
    """Whether every core had `is_ending` set when the last round began."""
    while_waiting: Callable[[], None]
    """Called repeatedly while this core waits for the others."""

    def idle_round(self, is_unfinished: bool) -> bool:
        """Make the next round without tokens of this core. `is_unfinished`: it may have some later.
        Returns False when no core has any.
        """
        ...
