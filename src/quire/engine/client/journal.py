"""The live requests of each core, and the order in which they run again after the core has died.

A request that crashes its core would crash it after every restart. So after a death the requests
that are cleared run first; the suspects follow in groups that shrink, until the one that crashes
the core is alone and is blamed. No clock and no sockets: supervisor.py acts on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.engine.wire.output_parts import Started

CLEARING_TOKENS = 2
"""Number of tokens in one incarnation of a core that clear a request: the first comes from
computing its prompt and all earlier output, the second from a step that decodes it.
"""


class Death(NamedTuple):
    """Verdict on a death: requests in `blamed` must not run again, those in `lost` cannot."""

    blamed: list[int]
    lost: list[int]


@dataclass(slots=True)
class JournalEntry:
    """A live request, and its output from all incarnations of its core."""

    request: EngineCoreRequest
    output: list[int] = field(default_factory=list)
    has_started: bool = False
    adapter: int = 0
    """Number of the adapter that its output was computed with."""
    reported: dict[str, bool] = field(default_factory=dict)
    """True for each field of the request that says that a part of its output was reported."""
    inputs: list[EngineCoreRequest] = field(default_factory=list)
    """Further input of a resumable request that is not sent yet."""

    def resumed(self, engine_index: int) -> Iterator[EngineCoreRequest]:
        """The messages with which the core `engine_index` continues the request where it stopped.

        Emitted tokens are sent as output, not as prompt, so that limits, penalties and counts stay
        right.
        """
        adapter = self.request.adapter
        if adapter is not None and self.adapter:
            # the folder may have other contents by now, with which the output must not go on
            adapter = msgspec.structs.replace(adapter, number=self.adapter)
        yield msgspec.structs.replace(
            self.request,
            adapter=adapter,
            output_token_ids=[*self.request.output_token_ids, *self.output],
            # pinned: this journal is told of the outputs of this core alone
            data_parallel_rank=engine_index,
            **self.reported,
        )
        inputs, self.inputs = self.inputs, []
        yield from inputs


class CoreJournal:
    """The live requests of one core, in the order of their arrival.

    Invariants: a request is sent, or it waits in one of `_groups` or in `_later`. `_uncleared` has
    the requests sent to this incarnation that are not cleared yet, with the number of tokens that
    are missing; `_awaited`, the group that runs as a test now, is a part of it. `num_fruitless`
    counts the deaths in a row without progress: no token since the restart, and no fewer suspects.
    """

    def __init__(self, engine_index: int) -> None:
        self.engine_index = engine_index
        self.num_fruitless = 0
        self.entries: dict[int, JournalEntry] = {}
        self._uncleared: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._groups: deque[list[int]] = deque()
        self._later: list[int] = []
        self._is_down = False
        self._has_progress = False
        self._num_suspects = 0
        self._lone_suspect: int | None = None
        """The only suspect of the last death that had suspects, unless it is cleared."""

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def is_isolating(self) -> bool:
        """Whether new requests wait until the suspects have run."""
        return bool(self._groups or self._awaited)

    # requests come and go

    def add(self, request: EngineCoreRequest) -> bool:
        """Keep a request, or input for one; False: it may not be sent before `due` returns it."""
        handle = request.handle
        if request.continues:
            return self._continue(request)
        self.entries[handle] = JournalEntry(request)
        # a new request in a group under test would be one more suspect
        if self._is_down or self.is_isolating:
            self._later.append(handle)
            return False
        self._uncleared[handle] = CLEARING_TOKENS
        return True

    def drop(self, handle: int) -> None:
        """Forget a request that has ended; unknown ones are ignored."""
        if self.entries.pop(handle, None) is not None:
            self._clear(handle)

    def take(self, outputs: EngineCoreOutputs) -> None:
        """Note outputs, and remove from them what an earlier incarnation has reported already."""
        if outputs.handles or outputs.finished:
            self._has_progress = True
            self._note_tokens(outputs)
        for part in outputs.parts:
            if part.done_field is not None and part.handle in self.entries:
                self.entries[part.handle].reported[part.done_field] = True
        if outputs.started:
            outputs.started = [start for start in outputs.started if self._is_first(start)]
        for end in outputs.finished:
            self.drop(end.handle)

    def due(self) -> list[EngineCoreRequest]:
        """Messages to send now, in this order: after a restart, and after `take` and `drop`."""
        if self._is_down or self._awaited:
            return []
        found: list[EngineCoreRequest] = []
        while self._groups and not self._awaited:
            group = self._groups.popleft()
            # only one group is sent at a time: if the core dies again, the suspects are known to be
            # among it
            found += self._send(group)
            # a request that waits for its caller may never clear, and must not hold up the next
            # group
            self._awaited = {h for h in group if h in self.entries and not self._may_pause(h)}
        if not self._groups and not self._awaited:
            found += self._send(self._later)
            self._later, self._num_suspects = [], 0
        return found

    # deaths and restarts

    def restarted(self) -> None:
        """The core was restarted: `due` says what it runs."""
        self._is_down = False

    def died(self, in_step: Collection[int] | None) -> Death:
        """The core is dead; `in_step` are the requests of the steps that it was running (None:
        unknown).

        Those of them that are not cleared are suspects. The only suspect of two deaths in a row is
        blamed: one death may be chance.
        """
        # without a record of the last steps every uncleared request may have done it
        suspects = [h for h in self._uncleared if in_step is None or h in in_step]
        self._count(suspects)
        return self._on_end(suspects, self._blame(suspects))

    def ended_with_group(self) -> Death:
        """The core ended as another of its group died: blames no request and counts no death."""
        return self._on_end([], [])

    def _on_end(self, suspects: list[int], blamed: list[int]) -> Death:
        lost = [handle for handle, entry in self.entries.items() if entry.request.resumable]
        # its earlier inputs are in the core's memory alone; one that was never sent has all of them
        # here
        lost = [handle for handle in lost if self._is_sent(handle)]
        self._regroup([h for h in suspects if h not in blamed and h not in lost], lost)
        for handle in (*blamed, *lost):
            self.drop(handle)
        self._is_down, self._has_progress = True, False
        self._uncleared.clear()
        self._awaited.clear()
        return Death(blamed, [handle for handle in lost if handle not in blamed])

    # details

    def _continue(self, request: EngineCoreRequest) -> bool:
        entry = self.entries.get(request.handle)
        if entry is None:
            return False
        if self._is_sent(request.handle):
            return True
        entry.inputs.append(request)
        return False

    def _note_tokens(self, outputs: EngineCoreOutputs) -> None:
        entries = self.entries
        if outputs.counts is None:
            for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
                if handle in entries:
                    entries[handle].output.append(token_id)
        else:
            start = 0
            for handle, count in zip(outputs.handles, outputs.counts, strict=True):
                if handle in entries:
                    entries[handle].output += outputs.token_ids[start : start + count]
                start += count
        if self._uncleared:
            self._note_cleared(outputs)

    def _note_cleared(self, outputs: EngineCoreOutputs) -> None:
        counts = outputs.counts or [1] * len(outputs.handles)
        for handle, count in zip(outputs.handles, counts, strict=True):
            missing = self._uncleared.get(handle)
            if missing is not None:
                self._uncleared[handle] = missing - count
                if missing <= count:
                    self._clear(handle)

    def _clear(self, handle: int) -> None:
        if handle == self._lone_suspect:
            self._lone_suspect = None
        self._uncleared.pop(handle, None)
        self._awaited.discard(handle)

    def _is_first(self, start: Started) -> bool:
        entry = self.entries.get(start.handle)
        if entry is None or entry.has_started:
            return False
        entry.has_started, entry.adapter = True, start.adapter
        return True

    def _is_sent(self, handle: int) -> bool:
        return handle not in self._later and not any(handle in group for group in self._groups)

    def _may_pause(self, handle: int) -> bool:
        """Whether it may have no output for long, since it waits for input."""
        return self.entries[handle].request.resumable

    def _send(self, handles: Iterable[int]) -> list[EngineCoreRequest]:
        found: list[EngineCoreRequest] = []
        for handle in handles:
            entry = self.entries.get(handle)
            if entry is not None:
                found += entry.resumed(self.engine_index)
                self._uncleared[handle] = CLEARING_TOKENS
        return found

    def _count(self, suspects: list[int]) -> None:
        # fewer suspects than before is progress, though no token came: the search ends after log2
        # of them
        narrowed = 0 < len(suspects) < self._num_suspects
        self.num_fruitless = 0 if self._has_progress or narrowed else self.num_fruitless + 1
        self._num_suspects = len(suspects) or self._num_suspects

    def _blame(self, suspects: list[int]) -> list[int]:
        if not suspects:
            return []
        before, self._lone_suspect = self._lone_suspect, suspects[0] if len(suspects) == 1 else None
        # alone once may be chance, such as a kill from outside; alone twice is not
        if self._lone_suspect is None or self._lone_suspect != before:
            return []
        self.num_fruitless = self._num_suspects = 0
        return suspects

    def _regroup(self, suspects: list[int], lost: list[int]) -> None:
        """Order the requests: cleared ones, suspects in halves, the untested group, all others."""
        unsent = {handle for group in self._groups for handle in group}.union(self._later)
        sent = [h for h in self.entries if h not in unsent and h not in suspects and h not in lost]
        cleared = [handle for handle in sent if handle not in self._uncleared]
        untested = [handle for handle in sent if handle in self._awaited]
        if suspects or untested or self._groups:
            # cleared ones first, because their users have waited longest for the next token; the
            # halves shrink, so that the last one is a single request
            groups = [group for group in (cleared, *_halves(suspects), untested) if group]
            self._groups.extendleft(reversed(groups))
        else:
            # no suspects: what ran well goes on with all others, in the order of arrival
            self._later += cleared
        # sent, not cleared, and in no step of the dead core: they have shown nothing yet, so they
        # wait for the end of the search as new requests do
        rest = {*(h for h in sent if h in self._uncleared), *self._later}.difference(untested)
        self._later = [handle for handle in self.entries if handle in rest]


def _halves(suspects: list[int]) -> Iterator[list[int]]:
    """Half of them, half of those left, and so on down to one."""
    while suspects:
        middle = (len(suspects) + 1) // 2
        yield suspects[:middle]
        suspects = suspects[middle:]
