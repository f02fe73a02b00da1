"""Whether an engine is paused or asleep, and what it keeps, for cores that are restarted."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from quire.engine.control_verbs import UTILITIES
from quire.engine.wire.control_calls import Utility

REPEATABLE = frozenset(name for name, method in UTILITIES.items() if method.is_repeatable)
"""Utilities that may be called again when it is not known whether they were performed."""


class ControlState:
    """Whether the engine is paused and asleep, and its adapters, by calls that have succeeded."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Utility[Any]]] = {"paused": [], "asleep": []}
        """The calls that put a core into each state; `wake_up` may have undone a part of them."""
        self._kept: dict[Hashable, Utility[Any]] = {}
        """The last call of each name that has not been dropped."""

    def note(self, call: Utility[Any], answer: object) -> None:
        """Record a call that succeeded; the answer False: it has ended only a part of the state."""
        method = UTILITIES[call.method]
        for name in method.drops(*call.args):
            self._kept.pop(name, None)
        if method.keeps is not None and (name := method.keeps(*call.args)) is not None:
            self._kept[name] = replace(call, args=method.replay(*call.args))
        if method.ends is not None and answer is not False:
            self._calls[method.ends].clear()
        elif state := method.begins or method.ends:
            again = replace(call, args=method.replay(*call.args))
            if self._calls[state][-1:] != [again]:
                self._calls[state].append(again)

    def replay(self) -> list[Utility[Any]]:
        """The calls that bring a fresh core, which has no requests yet, to the same state."""
        return [*self._kept.values(), *self._calls["paused"], *self._calls["asleep"]]
