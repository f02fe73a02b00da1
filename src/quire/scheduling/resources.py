"""What limits admission: a request gets a row when every resource grants it tokens.

Resources are asked when a request could be admitted, and hear when it enters and leaves its row;
none of them is looked at in a steady decode step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Sized
from typing import Protocol

from quire.scheduling.block_tables import BlockTables
from quire.scheduling.decode_lane import DecodeLane
from quire.scheduling.request import Request
from quire.scheduling.settings import SchedulerConfig
from quire.scheduling.step import NewRow
from quire.scheduling.stop import StopWatch


class Resource(Protocol):
    """Something of which running requests hold a share."""

    holds_back_others: bool
    """Whether a request to which it grants nothing keeps those after it waiting, too (True), so
    that none overtakes it, or is passed over.
    """

    @property
    def is_exhausted(self) -> bool:
        """True when it could grant nothing to any request, so that none needs to be looked at."""
        ...

    def offer(self, request: Request, want: int) -> int:
        """How many of the next `want` tokens of a waiting request it grants; 0: not now."""
        ...

    def take(self, request: Request) -> None:
        """The request enters a row."""
        ...

    def give_back(self, request: Request) -> None:
        """The request, which had entered, leaves its row: finished, aborted or preempted."""
        ...


class Resources:
    """The resources of a scheduler, asked in order."""

    def __init__(self, tokens: TokenBudget, held: Sequence[Resource]) -> None:
        """tokens: those of the step at hand. held: what a request holds while it has a row."""
        self._tokens = tokens
        self._held = held

    @property
    def is_exhausted(self) -> bool:
        """Whether no request can be admitted."""
        return self._tokens.is_exhausted or any(each.is_exhausted for each in self._held)

    def offer(self, request: Request) -> tuple[int, bool]:
        """How many tokens the request may compute now, and if none: whether those after it must
        wait, too.
        """
        granted = self._tokens.offer(request, request.num_tokens - request.num_hit_tokens)
        if granted == 0:
            return 0, True
        for resource in self._held:
            granted = resource.offer(request, granted)
            if granted == 0:
                return 0, resource.holds_back_others
        return granted, False

    def enter(self, request: Request) -> None:
        """The request gets a row."""
        for resource in self._held:
            resource.take(request)

    def leave(self, request: Request) -> None:
        """The request leaves its row, and the step that is being planned."""
        self._tokens.give_back(request)
        for resource in self._held:
            resource.give_back(request)


class TokenBudget:
    """The tokens of the step that is being planned. Each member of the decode lane has one; its
    drafts get what everything else leaves.
    """

    def __init__(self, config: SchedulerConfig, lane: DecodeLane, requests: Sized) -> None:
        self._limit = config.max_num_batched_tokens
        self._cap = config.long_prefill_token_threshold if config.enable_chunked_prefill else 0
        self._lane = lane
        self._requests = requests
        self._taken: dict[int, int] = {}
        self._num_taken = 0

    def begin(self) -> None:
        """A new step is planned."""
        if self._taken:
            self._taken = {}
            self._num_taken = 0

    @property
    def left(self) -> int:
        """Tokens that are not given out."""
        return max(0, self._limit - len(self._lane.members) - self._num_taken)

    @property
    def is_exhausted(self) -> bool:
        return self.left == 0

    def offer(self, request: Request, want: int) -> int:
        """Within the budget and, where another request exists, the cap for long prompts; all or
        nothing where a prompt may not be split.
        """
        left = self.left
        if request.is_whole:
            return want if want <= left else 0
        cap = self._cap if self._cap and len(self._requests) > 1 else want
        return min(want, left, cap)

    def take(self, request: Request, count: int) -> None:
        """The request has `count` tokens in this step."""
        self._taken[request.handle] = count
        self._num_taken += count

    def give_back(self, request: Request) -> None:
        """The request has none in this step any more."""
        self._num_taken -= self._taken.pop(request.handle, 0)


class RunningRows:
    """The rows as a resource, with the requests that hold one (idle ones included).

    A plan removes and adds what has changed since the plan before it.
    """

    holds_back_others = True

    def __init__(self, num_rows: int) -> None:
        self.requests: dict[int, Request] = {}
        """By row."""
        self.constrained: dict[int, Request] = {}
        """Those of them that have a grammar."""
        self.stops = StopWatch()
        self._free = list(range(num_rows))
        self._removed: list[int] = []
        self._added: dict[int, tuple[Request, int]] = {}
        """Handle -> request and its computed tokens, where the runner has yet to build the row."""

    @property
    def is_exhausted(self) -> bool:
        return not self._free

    def offer(self, request: Request, want: int) -> int:
        return want if self._free else 0

    def take(self, request: Request) -> None:
        request.row = heapq.heappop(self._free)
        self.requests[request.row] = request
        if request.grammar is not None:
            self.constrained[request.row] = request
        self.stops.add(request)
        self._added[request.handle] = request, request.num_hit_tokens

    def give_back(self, request: Request) -> None:
        self.stops.remove(request)
        self._removed.append(request.row)
        self._added.pop(request.handle, None)
        heapq.heappush(self._free, request.row)
        del self.requests[request.row]
        self.constrained.pop(request.row, None)
        request.row = -1

    def rebuild(self, request: Request) -> None:
        """The request keeps its row, but what the runner knows of it no longer holds."""
        self._removed.append(request.row)
        self._added[request.handle] = request, request.num_computed_tokens

    def is_new(self, handle: int) -> bool:
        """Whether the next plan adds the request's row, with all its blocks."""
        return handle in self._added

    def take_changes(self) -> tuple[list[int], list[NewRow]]:
        """The rows that the plan made now removes, and those that it adds after that."""
        removed, added = self._removed, [r.new_row(start) for r, start in self._added.values()]
        self._removed, self._added = [], {}
        return removed, added


class BlockBudget:
    """Blocks: a request is admitted when those that are free suffice for all tokens it has, besides
    what admitted prompts still need.
    """

    holds_back_others = True
    is_exhausted = False

    def __init__(self, memory: BlockTables, running: Iterable[Request]) -> None:
        """running: requests with uncomputed tokens."""
        self._memory = memory
        self._running = running

    def offer(self, request: Request, want: int) -> int:
        cost = self._memory.admission_cost(request)
        reserved = self._memory.outstanding(self._running)
        return want if cost + reserved <= self._memory.pool.num_free else 0

    def take(self, request: Request) -> None:
        self._memory.take_hit(request)

    def give_back(self, request: Request) -> None:
        self._memory.release(request)
