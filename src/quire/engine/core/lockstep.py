"""What a core that shares experts with others is told and asked about their common rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LockStep(Protocol):
    """One core's side of the rounds; distributed/expert_exchange.py does it.

    A step of the core that runs tokens makes rounds by itself: one, or several where it is run
    again in parts. All methods raise PeersLost when another core is gone.
    """

    num_rounds: int
    """So many have begun, counting those that ended a wave at once."""
    is_ending: bool
    """Set when this core has been told to end."""
    all_end: bool
    """Every core said so when the last round began."""
    while_waiting: Callable[[], None]
    """Called now and then while this core waits for the others."""

    def idle_round(self, is_unfinished: bool) -> bool:
        """Make the next round without tokens of this core, which may have some later; False when
        no core has any.
        """
        ...
