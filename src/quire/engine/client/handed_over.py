"""The streams of this front end that another server goes on with. Their clients stay here: what
the other server sends becomes outputs as if a core of ours had sent it.

The journal that resumes streams after the death of a core keeps them, too: where the other server
fails, they go on here from the last token that came. No clock and no sockets:
server/control/drain.py connects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from quire.distributed.peers.params import PARAMS, flag
from quire.engine.client.journal import CoreJournal, JournalEntry
from quire.engine.client.supervisor import Supervisor
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.params import SamplingParams

_GIVEN_UP = (FinishReason.ERROR, FinishReason.ABORT)
"""Ends by which the other server gives a stream up: no client of its own could have left it."""


class HandedOver:
    """Gives streams away and takes them back. Invariant: each is in one journal, and ends once."""

    def __init__(self, supervisor: Supervisor, announce: Callable[[], None]) -> None:
        """announce: wakes whoever waits for outputs."""
        self._supervisor, self._announce = supervisor, announce
        self._journal = CoreJournal(0)
        self._cores: dict[int, int] = {}
        """Streams -> the core that had them."""
        self._closers: dict[int, Callable[[], object]] = {}
        self.is_asking = False
        """Whether another server is being asked to go on with streams: none is taken over."""

    def __len__(self) -> int:
        return len(self._journal)

    def __contains__(self, handle: int) -> bool:
        return handle in self._journal.entries

    def candidates(self) -> list[int]:
        return [h for h, entry in self._supervisor.entries() if _can_go(entry)]

    def give(
        self, handle: int, transfer: dict[str, Any] | None, close: Callable[[], object]
    ) -> EngineCoreRequest | None:
        """Take a stream from its core, which schedules nothing now; None: it has ended. transfer:
        where its K/V is. close: ends the connection, when the stream's client has left.
        """
        found = self._supervisor.release(handle)
        if found is None:
            return None
        self._cores[handle], entry = found
        self._closers[handle] = close
        self._journal.entries[handle] = entry
        [request] = entry.resumed(0)
        params = request.params
        assert isinstance(params, SamplingParams), "a stream of tokens"
        extra = {k: v for k, v in (params.extra_args or {}).items() if k != PARAMS}
        if transfer is not None:
            extra[PARAMS] = transfer
        own = params.clone()
        own.extra_args = extra or None
        return msgspec.structs.replace(request, params=own, data_parallel_rank=None)

    def take(self, handle: int, outputs: EngineCoreOutputs) -> None:
        """Take in what the other server sends; a stream that it refuses or drops goes on here."""
        entry = self._journal.entries.get(handle)
        if entry is None:
            return
        own = _renamed(outputs, handle)
        own.engine_index = self._cores[handle]
        is_given_up = any(end.reason in _GIVEN_UP for end in own.finished)
        if is_given_up:
            own.finished = []
        self._journal.take(own)
        if own.finished:
            self._forget(handle)
        if own.handles or not is_given_up:
            self._supervisor.deliver(own)
        if is_given_up:
            self.take_back([handle])
        self._announce()

    def take_back(self, handles: Iterable[int]) -> None:
        """Go on here, after the tokens that have come, with streams that were away."""
        for handle in handles:
            entry = self._journal.entries.get(handle)
            if entry is None:
                continue
            # first: a stream is in one journal at a time
            self._forget(handle)
            self._supervisor.take_back(entry)
        self._announce()

    def send_again(self, handles: Iterable[int]) -> None:
        """Send streams anew after a drain that has failed: cores may have dropped some."""
        for handle in handles:
            if handle in self:
                self.take_back([handle])
            elif (found := self._supervisor.release(handle)) is not None:
                self._supervisor.take_back(found[1])
        self._announce()

    def abort(self, handles: Collection[int]) -> None:
        """Drop streams whose clients have left, or that have ended here."""
        for handle in handles:
            if handle in self._journal.entries:
                close = self._closers[handle]
                self._forget(handle)
                close()

    def _forget(self, handle: int) -> None:
        self._journal.drop(handle)
        self._cores.pop(handle, None)
        self._closers.pop(handle, None)


def _can_go(entry: JournalEntry) -> bool:
    """Whether a request is whole in its message: no adapter, media, more input or wanted K/V."""
    request, params = entry.request, entry.request.params
    if not isinstance(params, SamplingParams) or request.adapter is not None:
        return False
    if request.media is not None or request.resumable or request.continues:
        return False
    given = (params.extra_args or {}).get(PARAMS) or {}
    return not flag(given, "do_remote_decode") and given.get("remote_decoder") is None


def _renamed(outputs: EngineCoreOutputs, handle: int) -> EngineCoreOutputs:
    now = time.monotonic()
    return msgspec.structs.replace(
        outputs,
        handles=[handle] * len(outputs.handles),
        finished=_all_of(handle, outputs.finished),
        started=[
            msgspec.structs.replace(each, handle=handle, scheduled_time=now, queued_time=now)
            for each in outputs.started
        ],
        parts=_all_of(handle, outputs.parts),
        stats=None,
        timestamp=now,
        incarnation=0,
    )


def _all_of(handle: int, parts: Sequence[Any]) -> list[Any]:
    return [msgspec.structs.replace(part, handle=handle) for part in parts]
