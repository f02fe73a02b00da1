"""The client of cores in other processes for one thread, which it blocks."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from quire.engine.client.remote_cores import TICK_S, MPClient
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs

T = TypeVar("T")


class SyncMPClient(MPClient):
    """`EngineCoreClient` of cores in other processes; for one thread."""

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs. Empty when the cores have no requests of ours, or stand still."""
        self._require_open()
        links = self._links
        links.take()
        if not links.events:
            self._take()
        beats = [link.beat for link in links.links.values()]
        while not links.events and self._owners:
            self._wait(TICK_S)
            self._check_vitals()
            if not links.events and self._stands_still(beats):
                break
        return self._next_event() if links.events else EngineCoreOutputs()

    def call(self, utility: Utility[T]) -> T:
        """Ask every core, and give their one answer."""
        call_id, future = self._begin(utility)
        limit_s = utility.timeout_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not future.done():
            left_s = TICK_S if deadline is None else min(TICK_S, deadline - time.monotonic())
            if left_s <= 0:
                self._links.calls.forget(call_id)
                raise TimeoutError(f"{utility.method} was not answered within {limit_s:g} s.")
            self._wait(left_s)
            self._check_vitals()
        return future.result()

    def _stands_still(self, before: list[Any]) -> bool:
        """Has every core said since `before` that it has nothing to do?"""
        now = [link.beat for link in self._links.links.values() if not link.is_dead]
        return all(beat not in before and not beat.has_work for beat in now)
