"""Limits on admission: a request gets a row when every resource grants it tokens.

Resources are queried when a request could be admitted, and updated when it enters and leaves its
row. A steady decode step touches none of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from typing import Protocol

from quire.scheduling.block_tables import BlockTables
from quire.scheduling.decode_lane import DecodeLane
from quire.scheduling.request import Request
from quire.scheduling.settings import SchedulerConfig
from quire.step.plan import NewRow, PromptAllowance


class Resource(Protocol):
    """A limited resource; running requests hold shares of it."""

    holds_back_others: bool
    """Whether a request that gets nothing also blocks those after it, so that none overtakes it
    (True), or is skipped (False).
    """

    @property
    def is_exhausted(self) -> bool:
        """Whether it can grant nothing to any request, so that none needs to be tried."""
        ...

    def offer(self, request: Request, want: int) -> int:
        """Return how many of the next `want` tokens of a waiting request it grants; 0: not now."""
        ...

    def take(self, request: Request) -> None:
        """Take the request's share as it enters a row."""
        ...

    def give_back(self, request: Request) -> None:
        """Return the share of a request that leaves its row: finished, aborted or preempted."""
        ...


class Resources:
    """The resources of a scheduler, queried in order."""

    def __init__(self, tokens: TokenBudget, held: Sequence[Resource]) -> None:
        """`tokens` is the budget of the current step; `held`, what a request holds while it has a
        row.
        """
        self._tokens = tokens
        self._held = held

    @property
    def is_exhausted(self) -> bool:
        """Whether no request can be admitted."""
        return self._tokens.is_exhausted or any(each.is_exhausted for each in self._held)

    def offer(self, request: Request) -> tuple[int, bool]:
        """Return how many tokens the request may compute now; and if it is 0, whether the requests
        after it must wait as well.
        """
        granted = self._tokens.offer(request, request.num_tokens - request.num_hit_tokens)
        if granted == 0:
            # a prompt that must not be split waits for a step with more room, and nobody overtakes
            # it
            return 0, True
        for resource in self._held:
            granted = resource.offer(request, granted)
            if granted == 0:
                return 0, resource.holds_back_others
        return granted, False

    def enter(self, request: Request) -> None:
        """Take the request's shares as it enters a row."""
        for resource in self._held:
            resource.take(request)

    def leave(self, request: Request) -> None:
        """Return the shares of a request that leaves its row and the step that is being planned."""
        self._tokens.give_back(request)
        for resource in self._held:
            resource.give_back(request)


_LEAST_TOKENS = 8
"""Tokens that the first prompt of a step gets whatever the allowance."""
_UNIT_TOKENS = 8
"""A prompt that the allowance cuts gets a multiple of this many tokens. Larger units leave more of
the allowance unused at late positions, where it is a few tens of tokens; 24 rows take products and
attention no more time each than 32.
"""


class TokenBudget:
    """The tokens of the step that is being planned. Each member of the decode lane takes one;
    drafts get what is left at the end. While streams wait for the step, its prompts also have an
    allowance. Where requests run in micro-batches, a step has its share of them.
    """

    def __init__(
        self, config: SchedulerConfig, lane: DecodeLane, requests: Sized, num_rows: int
    ) -> None:
        """`num_rows`: the most requests that run."""
        self.limit = config.steps.max_num_batched_tokens
        self._cap = (
            config.steps.long_prefill_token_threshold if config.steps.enable_chunked_prefill else 0
        )
        self._lane = lane
        self._requests = requests
        self._taken: dict[int, tuple[int, float]] = {}
        """Handle -> its tokens, and what those of its prompt count as in the allowance."""
        self._num_taken = 0
        self.allowance: PromptAllowance | None = None
        """The bound on this step's prompts; None: nothing waits for the step."""
        self._used = 0.0
        """The part of the allowance that is used."""
        self._max_drafts = self.limit if config.max_drafts is None else config.max_drafts
        self._num_drafts = 0
        self._micro_batches, self._num_rows = config.micro_batches, num_rows
        self._share = self._num_rows
        """Most requests outside the lane that the step may have."""

    def begin(self, allowance: PromptAllowance | None = None) -> None:
        """Start the budget of a new step; `allowance` is that of its prompts (None: there is
        none).
        """
        self.allowance, self._used = allowance, 0.0
        if self._micro_batches > 1:
            # of all that may run, in flight or not: else the first step would take every request,
            # and the other stages would have nothing to do meanwhile
            runnable = min(len(self._requests), self._num_rows)
            self._share = -(-runnable // self._micro_batches)
        if self._taken:
            self._taken = {}
            self._num_taken = self._num_drafts = 0

    @property
    def drafts_left(self) -> int:
        """The drafts that the step may still verify."""
        return max(0, min(self.left, self._max_drafts - self._num_drafts))

    @property
    def left(self) -> int:
        """The tokens that are still free."""
        return max(0, self.limit - len(self._lane.members) - self._num_taken)

    @property
    def is_exhausted(self) -> bool:
        used_up = self.allowance is not None and self._used >= self.allowance.tokens
        return self.left == 0 or (used_up and self._used > 0) or self._is_full

    @property
    def _is_full(self) -> bool:
        """Whether the step has its share of the requests."""
        return len(self._taken) >= self._share

    def offer(self, request: Request, want: int) -> int:
        """Within the budget, the allowance, the share of requests and, where another request
        exists, the cap for long prompts; all or nothing where a prompt, or what stands next in it,
        may not be split.
        """
        if self._is_full:
            return 0
        left = self.left
        least = 1
        if request.is_whole:
            least = want
        elif request.media:
            least = request.least_chunk(request.num_tokens - want)
        cap = self._cap if self._cap and len(self._requests) > 1 else want
        allowed = self._allowed(request, want)
        granted = min(want, left, cap, allowed)
        if granted >= least or least == 1:
            return granted
        fits = self._used == 0 or allowed >= least
        return least if least <= left and fits else 0

    def _allowed(self, request: Request, want: int) -> int:
        """The part of the next `want` tokens that the allowance admits. A single one, which may be
        a stream's, it has always.
        """
        if self.allowance is None or want == 1:
            return want
        fitting = self.allowance.fitting(request.num_tokens - want, self._used)
        if fitting >= want:
            return want
        least = 0 if self._used else _LEAST_TOKENS
        return max(least, fitting // _UNIT_TOKENS * _UNIT_TOKENS)

    def take(self, request: Request, count: int, num_drafts: int = 0) -> None:
        """Take `count` tokens of this step, and drafts after them, for the request."""
        cost = 0.0
        if self.allowance is not None and count > 1:
            cost = self.allowance.cost(request.num_computed_tokens, count)
        self._taken[request.handle] = count + num_drafts, cost
        self._num_taken += count + num_drafts
        self._num_drafts += num_drafts
        self._used += cost

    def give_back(self, request: Request) -> None:
        """Return the request's tokens of this step."""
        count, cost = self._taken.pop(request.handle, (0, 0.0))
        self._num_taken -= count
        self._used -= cost


class StopWatch:
    """The ids that can end some running request, so that a step's ids are checked all at once."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, request: Request) -> None:
        self._counts.update(request.stop_ids)

    def remove(self, request: Request) -> None:
        for token in request.stop_ids:
            self._counts[token] -= 1
            if self._counts[token] == 0:
                del self._counts[token]

    def may_stop(self, token_ids: Iterable[int]) -> bool:
        return not self._counts.keys().isdisjoint(token_ids)


class RunningRows:
    """The rows as a resource, with the requests that hold one (idle ones included).

    A plan removes and adds what has changed since the plan before it.
    """

    holds_back_others = True

    def __init__(self, num_rows: int) -> None:
        self.requests: dict[int, Request] = {}
        """The requests by row."""
        self.constrained: dict[int, Request] = {}
        """The requests with a grammar, by row."""
        self.stops = StopWatch()
        self.count = num_rows
        self._free = list(range(num_rows))
        self._removed: list[int] = []
        self._added: dict[int, tuple[Request, int]] = {}
        """Handle -> request and its computed tokens, for rows that the runner has yet to build."""

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
        """Have the runner build the request's row again, because its state there is outdated."""
        self._removed.append(request.row)
        self._added[request.handle] = request, request.num_computed_tokens

    def is_new(self, handle: int) -> bool:
        """Whether the next plan adds the request's row, with all its blocks."""
        return handle in self._added

    def take_changes(self) -> tuple[list[int], list[NewRow]]:
        """Return the rows that the current plan removes, and those that it then adds."""
        removed, added = self._removed, [r.new_row(start) for r, start in self._added.values()]
        self._removed, self._added = [], {}
        return removed, added


class BlockBudget:
    """The KV blocks: a request is admitted when the free ones suffice for all its tokens, in
    addition to what admitted prompts still need.
    """

    holds_back_others = True
    is_exhausted = False

    def __init__(self, memory: BlockTables, running: Sequence[Request]) -> None:
        """`running` has the requests with uncomputed tokens, the admitted ones last."""
        self._memory = memory
        self._running = running
        self._num_counted = 0
        self._outstanding = 0

    def begin(self) -> None:
        self._num_counted = self._outstanding = 0

    @property
    def outstanding(self) -> int:
        """Blocks that running requests still need for the tokens they have. To be read while a step
        admits requests: the tables of others do not change then, so that each is counted once.
        """
        admitted = self._running[self._num_counted :]
        self._num_counted += len(admitted)
        self._outstanding += self._memory.outstanding(admitted)
        return self._outstanding

    def offer(self, request: Request, want: int) -> int:
        if not self._memory.keeps_blocks:
            return want
        cost = self._memory.admission_cost(request) + self.outstanding
        left = self._memory.pool.num_free - cost
        request.takes_snapshot = left < self._memory.snapshot_cost(request)
        return want if left >= 0 else 0

    def take(self, request: Request) -> None:
        self._memory.take_hit(request)

    def give_back(self, request: Request) -> None:
        self._memory.release(request)
