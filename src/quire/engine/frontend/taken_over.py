"""The streams of other servers' clients that cores of this one go on with.

Each has a front end of its own, as far as handles go: what cores send is cut by front ends
anyway (shared_cores/split_outputs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from quire.engine.shared_cores.split_outputs import outputs_by_client
from quire.engine.wire.messages import CLIENT_SHIFT, EngineCoreOutputs, EngineCoreRequest

logger = logging.getLogger(__name__)

_FIRST, _LAST = 1 << 16, 1 << 22
"""Indices of front ends that servers do not have."""

Deliver = Callable[[EngineCoreOutputs | None], None]
"""Takes outputs of a stream; None: the engine is dead. An exception ends the stream."""


class Sends(Protocol):
    """The part of a client of cores that is needed here."""

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, handles: list[int]) -> None: ...


class TakenOver:
    """Sends streams of others to cores, and their outputs back."""

    def __init__(self, client: Sends) -> None:
        self._client = client
        self.streams: dict[int, Deliver] = {}
        self._next = _FIRST

    def __len__(self) -> int:
        return len(self.streams)

    def begin(self, request: EngineCoreRequest, deliver: Deliver) -> int:
        """Go on with a stream; returns its handle. Raises what a client's `add_request` does."""
        number = self._free_number()
        handle = number << CLIENT_SHIFT
        self.streams[number] = deliver
        try:
            self._client.add_request(msgspec.structs.replace(request, handle=handle))
        except BaseException:
            del self.streams[number]
            raise
        return handle

    def end(self, handle: int) -> None:
        """End a stream that the other server has left."""
        if self.streams.pop(handle >> CLIENT_SHIFT, None) is not None:
            self._client.abort_requests([handle])

    def without(self, step: EngineCoreOutputs) -> EngineCoreOutputs:
        """Deliver what of a step is for others; returns the rest."""
        if not self.streams:
            return step
        own = EngineCoreOutputs(
            stats=step.stats,
            timestamp=step.timestamp,
            engine_index=step.engine_index,
            incarnation=step.incarnation,
            weight_version=step.weight_version,
        )
        for number, part in outputs_by_client(step).items():
            if number < _FIRST:
                own = part
                own.stats = step.stats
            else:
                self._deliver(number, part)
        return own

    def fail_all(self) -> None:
        """Tell the receivers of all streams that the engine is dead."""
        for number in list(self.streams):
            self._deliver(number, None)

    def _deliver(self, number: int, part: EngineCoreOutputs | None) -> None:
        """Give a stream's receiver what has come; an exception in it ends this stream alone."""
        deliver = self.streams.get(number)
        if deliver is None:
            return
        if part is None or part.finished:
            del self.streams[number]
        try:
            deliver(part)
        except Exception:
            logger.exception("A stream of another server ends: its outputs could not be delivered.")
            self.end(number << CLIENT_SHIFT)

    def _free_number(self) -> int:
        while True:
            number, self._next = self._next, self._next + 1 if self._next < _LAST else _FIRST
            if number not in self.streams:
                return number
