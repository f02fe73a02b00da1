"""What was asked of an engine as a whole and still holds, so that a new life of a core can be
brought to it.
"""

from __future__ import annotations

from typing import Any

from quire.engine.wire import control_calls
from quire.engine.wire.control_calls import Utility

REPEATABLE = frozenset(
    {
        *("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "get_supported_tasks"),
        *("pause_scheduler", "resume_scheduler", "is_scheduler_paused"),
        *("sleep", "wake_up", "is_sleeping", "release_kv_cache_memory"),
    }
)
"""Utilities that may be asked again when nobody knows whether they were performed."""


class ControlState:
    """Paused and asleep, as the calls that succeeded have left it."""

    def __init__(self) -> None:
        self._is_paused = False
        self._rest: list[Utility[Any]] = []
        """What put the engine to sleep, and what it has been given back since."""

    def note(self, call: Utility[Any], answer: object) -> None:
        """A call has succeeded with this answer."""
        method = call.method
        if method == "pause_scheduler":
            self._is_paused = True
        elif method == "resume_scheduler":
            self._is_paused = False
        elif method == "sleep":
            self._rest.append(control_calls.sleep(call.args[0], "keep"))
        elif method == "release_kv_cache_memory":
            self._rest.append(call)
        elif method == "wake_up":
            self._rest = [] if answer is True else [*self._rest, call]

    def replay(self) -> list[Utility[Any]]:
        """The calls that bring a fresh core, which has no requests yet, to the same state."""
        paused = [control_calls.pause_scheduler("keep")] if self._is_paused else []
        return [*paused, *self._rest]
