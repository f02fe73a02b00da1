"""What became of each plugin in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from quire.plugins.entry_points import EntryPoint


@dataclass(slots=True)
class PluginRecord:
    """A plugin that was loaded: `changes` are the entries that it added to tables, `failure` is why
    it was left out. `is_given_up`: whatever it still does comes too late.
    """

    point: EntryPoint
    changes: list[str] = field(default_factory=list)
    failure: str | None = None
    is_given_up: bool = False
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def note(self, change: str, undo: Callable[[], object]) -> None:
        """Note an entry that it added, and what takes it away."""
        self.changes.append(change)
        self._undo.append(undo)

    def take_back(self) -> None:
        """Take its entries away."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.changes.clear()


_running: ContextVar[PluginRecord | None] = ContextVar("plugin", default=None)


def current_record() -> PluginRecord | None:
    """The record of the plugin whose code calls; None where a program does."""
    return _running.get()


def enter(record: PluginRecord) -> None:
    """Let what this thread's code registers from now on be the plugin's."""
    _running.set(record)
