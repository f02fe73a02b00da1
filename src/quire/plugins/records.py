"""Records of the plugins of this process: what each has added, or why it was left out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from quire.errors import PluginError
from quire.plugins.entry_points import EntryPoint


@dataclass(slots=True)
class PluginRecord:
    """A plugin that was loaded: `changes` are the entries that it added to tables, `failure` is why
    it was left out; whatever it still does comes too late then.
    """

    point: EntryPoint
    changes: list[str] = field(default_factory=list)
    failure: str | None = None
    _undo: list[Callable[[], object]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, change: str, undo: Callable[[], object]) -> None:
        """Note an entry that it added, and what takes it away. Raises PluginError, and takes the
        entry away, where the plugin was left out meanwhile.
        """
        with self._lock:
            # it took too long, and its thread goes on
            if self.failure is not None:
                undo()
                raise PluginError(f"{self.point.title} was given up; it came too late.")
            self.changes.append(change)
            self._undo.append(undo)

    def fail(self, failure: str) -> None:
        """Leave the plugin out, and take its entries away; the first failure stays."""
        with self._lock:
            self.failure = self.failure or failure
            self._take_back()

    def take_back(self) -> None:
        with self._lock:
            self._take_back()

    def _take_back(self) -> None:
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
