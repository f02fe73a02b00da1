"""What a front end must know to run its requests again when their core has died, and in what order.

A request that kills its core would kill every life of it. So those that may be guilty are tried in
groups that shrink, behind those that have proved innocent, until the culprit is alone. Pure: no
clock, no sockets; engine/client/supervisor.py does what it says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest, Started

CLEARING_TOKENS = 2
"""So many tokens in one life prove that a request can be run: the first comes of computing all that
is known of it at once, the second of a step that decodes it.
"""


class Death(NamedTuple):
    """What a death means: `convicted` must not run again, `lost` cannot be run again."""

    convicted: list[int]
    lost: list[int]


@dataclass(slots=True)
class JournalEntry:
    """A live request, and what has come of it in all lives of its core."""

    request: EngineCoreRequest
    output: list[int] = field(default_factory=list)
    has_started: bool = False
    has_prompt_logprobs: bool = False
    inputs: list[EngineCoreRequest] = field(default_factory=list)
    """Further input of a resumable request that waits as the request does."""

    def resumed(self, engine_index: int) -> Iterator[EngineCoreRequest]:
        """The messages that let the core `engine_index` go on where the last one stopped.

        What was emitted is output, not prompt, so that limits, penalties and counts stay right.
        """
        yield msgspec.structs.replace(
            self.request,
            output_token_ids=[*self.request.output_token_ids, *self.output],
            prompt_logprobs_done=self.request.prompt_logprobs_done or self.has_prompt_logprobs,
            data_parallel_rank=engine_index,
        )
        inputs, self.inputs = self.inputs, []
        yield from inputs


class CoreJournal:
    """The live requests of one core, in the order of their arrival.

    Invariants: a request is sent, or it waits in one of `_groups` or in `_later`; `_unproved` has
    those sent in this life that have not proved harmless yet, with the tokens that they still owe;
    `_awaited`, the group that is being tried, is a part of it. `num_fruitless` counts the deaths in
    a row that brought nothing: no token, and no smaller circle of suspects.
    """

    def __init__(self, engine_index: int) -> None:
        self.engine_index = engine_index
        self.num_fruitless = 0
        self.entries: dict[int, JournalEntry] = {}
        self._unproved: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._groups: deque[list[int]] = deque()
        self._later: list[int] = []
        self._is_down = False
        self._has_brought = False
        self._num_suspects = 0
        self._alone: int | None = None
        """Who was the only suspect when there were suspects last, and has not proved harmless."""

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def is_isolating(self) -> bool:
        """Whether new requests wait until those under suspicion have been tried."""
        return bool(self._groups or self._awaited)

    # requests come and go

    def add(self, request: EngineCoreRequest) -> bool:
        """Keep a request, or further input for one. Whether it may be sent now; otherwise it comes
        out of `due` when it may.
        """
        handle = request.handle
        if request.continues:
            return self._continue(request)
        self.entries[handle] = JournalEntry(request)
        if self._is_down or self.is_isolating:
            self._later.append(handle)
            return False
        self._unproved[handle] = CLEARING_TOKENS
        return True

    def drop(self, handle: int) -> None:
        """The request was aborted; of one that is not here nothing changes."""
        if self.entries.pop(handle, None) is not None:
            self._clear(handle)

    def take(self, outputs: EngineCoreOutputs) -> None:
        """Note what the core has brought, and strike what an earlier life had brought already."""
        if outputs.handles or outputs.finished:
            self._has_brought = True
            self._note_tokens(outputs)
        for prompt in outputs.prompt_logprobs:
            entry = self.entries.get(prompt.handle)
            if entry is not None:
                entry.has_prompt_logprobs = True
        if outputs.started:
            outputs.started = [start for start in outputs.started if self._is_first(start)]
        for end in outputs.finished:
            self.drop(end.handle)

    def due(self) -> list[EngineCoreRequest]:
        """What is to be sent now, in this order. To be asked after a restart, and behind `take` and
        `drop` while there may be something.
        """
        if self._is_down or self._awaited:
            return []
        found: list[EngineCoreRequest] = []
        while self._groups and not self._awaited:
            group = self._groups.popleft()
            found += self._send(group)
            self._awaited = {h for h in group if h in self.entries and not self._rests(h)}
        if not self._groups and not self._awaited:
            found += self._send(self._later)
            self._later, self._num_suspects = [], 0
        return found

    # lives begin and end

    def restarted(self) -> None:
        """A new life has begun: `due` says what it is for."""
        self._is_down = False

    def died(self, in_step: Collection[int] | None) -> Death:
        """The core is dead; `in_step` are the requests of the steps that it was running (None:
        nobody knows).

        Suspects are those of them that have not proved harmless. Who is the only suspect twice in a
        row is convicted: once may be chance.
        """
        suspects = [h for h in self._unproved if in_step is None or h in in_step]
        self._count(suspects)
        return self._end_life(suspects, self._convict(suspects))

    def fell(self) -> Death:
        """The core is dead since another one is with which it stepped together: nobody here is to
        blame, and the life does not count.
        """
        return self._end_life([], [])

    def _end_life(self, suspects: list[int], convicted: list[int]) -> Death:
        lost = [handle for handle, entry in self.entries.items() if entry.request.resumable]
        lost = [handle for handle in lost if self._is_sent(handle)]
        self._regroup([h for h in suspects if h not in convicted and h not in lost], lost)
        for handle in (*convicted, *lost):
            self.drop(handle)
        self._is_down, self._has_brought = True, False
        self._unproved.clear()
        self._awaited.clear()
        return Death(convicted, [handle for handle in lost if handle not in convicted])

    # inside

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
        if self._unproved:
            self._note_proofs(outputs)

    def _note_proofs(self, outputs: EngineCoreOutputs) -> None:
        counts = outputs.counts or [1] * len(outputs.handles)
        for handle, count in zip(outputs.handles, counts, strict=True):
            owed = self._unproved.get(handle)
            if owed is not None:
                self._unproved[handle] = owed - count
                if owed <= count:
                    self._clear(handle)

    def _clear(self, handle: int) -> None:
        if handle == self._alone:
            self._alone = None
        self._unproved.pop(handle, None)
        self._awaited.discard(handle)

    def _is_first(self, start: Started) -> bool:
        entry = self.entries.get(start.handle)
        if entry is None or entry.has_started:
            return False
        entry.has_started = True
        return True

    def _is_sent(self, handle: int) -> bool:
        return handle not in self._later and not any(handle in group for group in self._groups)

    def _rests(self, handle: int) -> bool:
        """Whether it may be silent for long without being at fault."""
        return self.entries[handle].request.resumable

    def _send(self, handles: Iterable[int]) -> list[EngineCoreRequest]:
        found: list[EngineCoreRequest] = []
        for handle in handles:
            entry = self.entries.get(handle)
            if entry is not None:
                found += entry.resumed(self.engine_index)
                self._unproved[handle] = CLEARING_TOKENS
        return found

    def _count(self, suspects: list[int]) -> None:
        narrowed = 0 < len(suspects) < self._num_suspects
        self.num_fruitless = 0 if self._has_brought or narrowed else self.num_fruitless + 1
        self._num_suspects = len(suspects) or self._num_suspects

    def _convict(self, suspects: list[int]) -> list[int]:
        if not suspects:
            return []
        before, self._alone = self._alone, suspects[0] if len(suspects) == 1 else None
        if self._alone is None or self._alone != before:
            return []
        self.num_fruitless = self._num_suspects = 0
        return suspects

    def _regroup(self, suspects: list[int], lost: list[int]) -> None:
        """The order: the proved, the suspects in halves, who was to be tried, all others."""
        unsent = {handle for group in self._groups for handle in group}.union(self._later)
        sent = [h for h in self.entries if h not in unsent and h not in suspects and h not in lost]
        proved = [handle for handle in sent if handle not in self._unproved]
        untried = [handle for handle in sent if handle in self._awaited]
        if suspects or untried or self._groups:
            groups = [group for group in (proved, *_halves(suspects), untried) if group]
            self._groups.extendleft(reversed(groups))
        else:
            self._later += proved
        rest = {*(h for h in sent if h in self._unproved), *self._later}.difference(untried)
        self._later = [handle for handle in self.entries if handle in rest]


def _halves(suspects: list[int]) -> Iterator[list[int]]:
    """Half of them, half of the rest, and so on down to one."""
    while suspects:
        middle = (len(suspects) + 1) // 2
        yield suspects[:middle]
        suspects = suspects[middle:]
