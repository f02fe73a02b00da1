"""The slots of LoRA adapters as a resource: what the rows of one step can compute with.

A slot keeps its adapter after the last request of it has ended, until another one needs the slot;
the slot whose last use is longest ago goes first. A waiting request without a slot is passed over.
Once that has happened `max_passes` times, no request after it enters the slot that has the fewest
users, so that this slot is free in the end however many requests of its adapter keep coming.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from quire.scheduling.request import Request
from quire.scheduling.scheduler_output import InFlightStep


class SlotAllocator:
    """The adapter in each slot, and the number of its running requests. Slots count from 1.

    `kept` are the adapters whose weights the workers have, which the engine core maintains; a slot
    is filled from there. What a step lacked is in `wanted`. Adapters in `pinned` keep their slots.

    Invariants: every slot is free or has an adapter; an adapter has at most one slot; a slot gets
    another adapter only when no step in flight has rows that use it; who may enter in a step
    follows from the requests in their order alone, nothing is reserved beyond it.
    """

    holds_back_others = False
    is_exhausted = False

    def __init__(
        self, num_slots: int, max_passes: int, in_flight: Collection[InFlightStep]
    ) -> None:
        """in_flight: the steps whose results are not known yet, the oldest first."""
        self.num_slots = num_slots
        self.kept: set[int] = set()
        self.pinned: set[int] = set()
        self.wanted: dict[int, None] = {}
        self._max_passes = max_passes
        self._in_flight = in_flight
        self._free = list(range(1, num_slots + 1))
        self._slots: dict[int, int] = {}
        self._users: dict[int, int] = {}
        """Adapter in a slot -> its running requests; those without any stand first, by last use."""
        self._last_step: dict[int, int] = {}
        """Adapter without running requests -> the last step that may compute with it."""
        self._loads: dict[int, int] = {}
        """Slot -> adapter that the next plan copies into it."""
        self._closed: set[int] = set()
        """Adapters in slots that no further request may enter in this step."""
        self._num_reserved = 0
        """Free slots that requests passed over too often wait for in this step."""

    # queried by the scheduler

    def begin(self) -> None:
        self.wanted.clear()
        self._closed.clear()
        self._num_reserved = 0

    def admits(self, request: Request) -> bool:
        """Whether a waiting request could have a slot now; if not, it is passed over once more.

        To be called in the order of the policy: a request that was passed over too often takes
        slots from those after it.
        """
        number = request.adapter
        if number == 0:
            return True
        if number in self._slots:
            may_enter = number not in self._closed
        elif number in self.wanted:
            may_enter = False
        else:
            may_enter = self._may_take_slot(number, request.num_passes >= self._max_passes)
        if not may_enter:
            request.num_passes += 1
        return may_enter

    def offer(self, request: Request, want: int) -> int:
        """Grants everything: `admits` has refused what cannot have a slot."""
        return want

    def take(self, request: Request) -> None:
        number = request.adapter
        if number == 0:
            return
        if number not in self._slots:
            self._fill(number)
        self._users[number] = self._users.pop(number, 0) + 1
        self._last_step.pop(number, None)
        request.adapter_slot = self._slots[number]
        request.num_passes = 0

    def give_back(self, request: Request) -> None:
        number = request.adapter
        if number == 0:
            return
        request.adapter_slot = 0
        self._users[number] -= 1
        if self._users[number] == 0:
            self._last_step[number] = max((step.step_id for step in self._in_flight), default=-1)

    def take_loads(self) -> list[tuple[int, int]]:
        """The slots that the current plan fills, with their adapters."""
        loads, self._loads = list(self._loads.items()), {}
        return loads

    # queried by the engine core

    @property
    def in_slots(self) -> Collection[int]:
        return self._slots.keys()

    @property
    def in_use(self) -> list[int]:
        """The adapters of running requests."""
        return [number for number, count in self._users.items() if count]

    @property
    def needed(self) -> set[int]:
        """The adapters whose weights must be kept for the next steps, as many as slots at most."""
        return {*self.wanted, *self._loads.values()}

    def is_hopeless(self, number: int) -> bool:
        """Whether all slots are pinned for other adapters."""
        return number not in self.pinned and len(self.pinned) >= self.num_slots

    def forget(self, numbers: Iterable[int]) -> None:
        """Free the slots of adapters that no request uses; others keep theirs."""
        for number in list(numbers):
            if number in self._slots and self._is_unused(number):
                heapq.heappush(self._free, self._empty(number))

    # details

    def _may_take_slot(self, number: int, is_overdue: bool) -> bool:
        """Whether an adapter without a slot can have one now; an overdue one gets the next."""
        victim = self._evictable()
        if self._num_free > 0 or victim is not None:
            if number in self.kept:
                return True
            if is_overdue:
                self._reserve(victim)
        elif is_overdue:
            self._drain()
        else:
            return False
        if number in self.pinned or len(self.wanted) < self.num_slots - len(self.pinned):
            self.wanted[number] = None
        return False

    @property
    def _num_free(self) -> int:
        return len(self._free) - self._num_reserved

    def _is_unused(self, number: int) -> bool:
        """Whether neither a request nor a step in flight uses its slot."""
        if self._users[number]:
            return False
        oldest = min((step.step_id for step in self._in_flight), default=None)
        return oldest is None or oldest > self._last_step[number]

    def _evictable(self) -> int | None:
        """The unused adapter whose last use is longest ago; None: each has users."""
        for number in self._last_step:
            if number not in self.pinned and number not in self._closed and self._is_unused(number):
                return number
        return None

    def _reserve(self, victim: int | None) -> None:
        """Keep a slot from the requests that come later in this step."""
        if self._num_free > 0:
            self._num_reserved += 1
        elif victim is not None:
            self._closed.add(victim)

    def _drain(self) -> None:
        """Close the slot with the fewest users to the requests that come later in this step.

        That number only falls from one step to the next as long as a request is overdue, so the
        choice may be made anew in each step and a slot is free in the end.
        """
        open_ones = [n for n in self._slots if n not in self.pinned and n not in self._closed]
        if open_ones:
            self._closed.add(min(open_ones, key=lambda number: self._users[number]))

    def _fill(self, number: int) -> None:
        if self._num_free > 0:
            slot = heapq.heappop(self._free)
        else:
            victim = self._evictable()
            assert victim is not None, "a request was admitted without a slot for its adapter"
            slot = self._empty(victim)
        self._slots[number] = slot
        self._loads[slot] = number

    def _empty(self, number: int) -> int:
        self._loads.pop(self._slots[number], None)
        del self._users[number], self._last_step[number]
        return self._slots.pop(number)
