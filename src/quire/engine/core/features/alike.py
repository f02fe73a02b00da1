"""Cores that plan the same steps, each for itself: those of a launcher's processes."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.core.features import CoreFeature
from quire.scheduling.request import Prerequisite
from quire.scheduling.scheduler import Scheduler

_LOOK_S = 1.0


class ReadyFirst(CoreFeature):
    """Has all requests get what they wait for, as grammars, before a step is planned: when it
    becomes ready differs between processes, and what is planned must not.
    """

    def __init__(self, scheduler: Scheduler, features: Sequence[CoreFeature]) -> None:
        """`features`: the others of the core, which take in what becomes ready."""
        self._scheduler = scheduler
        self._features = features

    def poll(self) -> Sequence[tuple[int, str]]:
        """Wait until no request lacks anything."""
        ended: list[tuple[int, str]] = []
        while (missing := self._missing()) is not None:
            missing.wait(_LOOK_S)
            for feature in self._features:
                ended += feature.poll()
        return ended

    def _missing(self) -> Prerequisite | None:
        for request in self._scheduler.waiting:
            for prerequisite in request.prerequisites:
                if not prerequisite.is_ready:
                    return prerequisite
        return None
