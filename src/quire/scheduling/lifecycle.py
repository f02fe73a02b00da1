"""The life of a request: from the waiting queue into a row, out of it, and to its end. The policy,
an order over requests, decides which runs first and which is preempted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.errors import RequestError
from quire.scheduling import streaming_input
from quire.scheduling.adapter_slots import SlotAllocator
from quire.scheduling.block_tables import BlockTables
from quire.scheduling.connection import ConnectedRequests, Connection
from quire.scheduling.decode_lane import DecodeLane
from quire.scheduling.encoder_cache import EncoderCache
from quire.scheduling.request import Request, State, Stop
from quire.scheduling.resources import BlockBudget, Resource, Resources, RunningRows, TokenBudget
from quire.scheduling.scheduler_output import FinishedRequest, InFlightStep
from quire.scheduling.settings import SchedulerConfig
from quire.scheduling.transfers import Tier, Transfers
from quire.step.plan import PromptAllowance

_OWN_WEIGHTS = 1 << 63
"""Added to a request's handle: the number of weights that this request alone computes with."""

Rank = tuple[float, ...]
Policy = Callable[[Request], Rank]
"""Smaller runs first; the largest among the running is the victim when memory runs out."""


def fcfs(request: Request) -> Rank:
    """First come, first served. A preempted request stays before all that arrived later."""
    return (request.order,)


def priority(request: Request) -> Rank:
    """Smaller priority number first, then first come."""
    # arrival at the front end, not here: several front ends send to one core
    return (request.priority, request.arrival_time, request.order)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def choose_victim(policy: Policy, running: Iterable[Request], request: Request) -> Request:
    """Choose the running request to preempt for `request`; it may be `request` itself."""
    # a request whose prompt is computed in one step would lose all of it, and would need all of it
    # in one step again
    return max((r for r in running if r is request or not r.is_protected), key=policy)


class WaitingQueue:
    """Waiting requests in the policy's order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: list[Request] = []
        self._deferred: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._policy)
        if request.prerequisites:
            self._deferred.append(request)

    @property
    def num_deferred(self) -> int:
        """The number that wait for a prerequisite. O(those that did when this was last read)."""
        waits = (State.WAITING, State.PREEMPTED)
        self._deferred = [r for r in self._deferred if r.state in waits and not r.is_ready]
        return len(self._deferred)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, self._policy(request), key=self._policy)
        assert self._requests[index] is request
        del self._requests[index]


@dataclass(slots=True)
class Counters:
    """Event counts since the start. Prefix hits are counted at a request's first admission, and
    those that were loaded from a tier as external ones, out of the tokens that the pool did not
    have. `num_drafts` were verified; `num_accepted[n]`: how many times n of those of a request in a
    step were right.
    """

    num_preemptions: int = 0
    prefix_requests: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    num_drafts: int = 0
    num_accepted: list[int] = field(default_factory=list)


class Lifecycle:
    """All requests and their states; every change of state is made here.

    A request waits; or it has a row and is in the decode lane, among the `chunked`, idle, or has
    its last token in flight; or it is idle without a row.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        resources: Sequence[Resource],
        tier: Tier | None,
        connection: Connection | None = None,
    ) -> None:
        """resources: those in addition to tokens, rows, blocks and slots of adapters."""
        self.max_len = config.max_len
        self.policy = POLICIES[config.steps.scheduling_policy]
        self.requests: dict[int, Request] = {}
        self.waiting = WaitingQueue(self.policy)
        self.rows = RunningRows(config.steps.max_num_seqs)
        self.in_flight: deque[InFlightStep] = deque()
        self.lane = DecodeLane(config.num_drafts, self.in_flight)
        self.chunked: list[Request] = []
        """Running requests outside the lane that have, or will have, tokens to compute."""
        self.memory = BlockTables(config)
        self.transfers = None if tier is None else Transfers(tier, self.memory)
        self.connections = (
            None if connection is None else ConnectedRequests(connection, self.memory)
        )
        self.tokens = TokenBudget(config, self.lane, self.requests, self.rows.count)
        self.blocks = BlockBudget(self.memory, self.chunked)
        self.adapters: SlotAllocator | None = None
        if config.num_adapter_slots:
            self.adapters = SlotAllocator(
                config.num_adapter_slots, config.max_adapter_passes, self.in_flight
            )
            resources = [self.adapters, *resources]
        self.encoders: EncoderCache | None = None
        if config.encoder_rows:
            self.encoders = EncoderCache(config.encoder_rows, is_deferred=config.defers_encodings)
            resources = [*resources, self.encoders]
        # rows and blocks first: they refuse most often
        self.resources = Resources(self.tokens, [self.rows, self.blocks, *resources])
        self.counters = Counters(num_accepted=[0] * (config.num_drafts + 1))
        self.now = 0.0
        """The time of the last plan."""
        self.weights = 0
        """Number of times that the model's weights have changed."""
        self._num_arrived = 0

    def begin_step(self, allowance: PromptAllowance | None) -> None:
        """Start the planning of a step; allowance: for its prompts if streams wait for it."""
        is_bound = allowance is not None and self._has_streams
        self.tokens.begin(allowance if is_bound else None)
        self.blocks.begin()
        if self.adapters is not None:
            self.adapters.begin()
        if self.encoders is not None:
            # a row takes at least as long as a token: towers see several patches for each
            self.encoders.begin(allowance.tokens if is_bound and allowance is not None else None)

    @property
    def _has_streams(self) -> bool:
        return bool(self.lane.members) or any(request.is_decoding for request in self.chunked)

    def may_enter(self, request: Request) -> bool:
        """Whether a waiting request lacks nothing but tokens, a row and blocks."""
        if not request.is_ready:
            return False
        return self.adapters is None or self.adapters.admits(request)

    def queue(self, request: Request) -> None:
        """Add a new request to the waiting queue. Raises RequestError for media that it cannot be
        given.
        """
        if self.encoders is not None:
            self.encoders.add(request)
        elif request.media:
            raise RequestError("this engine has no encoders for media")
        request.order = self._num_arrived
        self._num_arrived += 1
        self.requests[request.handle] = request
        self.waiting.add(request)

    def enter_row(self, request: Request, now: float) -> None:
        """Give a waiting request a row and the blocks of its hit; the caller removes it from the
        queue.
        """
        self.resources.enter(request)
        request.state = State.RUNNING
        self.chunked.append(request)
        hit = request.num_hit_tokens
        request.num_computed_tokens = hit
        request.num_confirmed_tokens = hit - request.num_unloaded_tokens
        # later admissions hit what the request itself has published, which says nothing about the
        # cache
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit
            request.scheduled_time = now
            self.counters.prefix_requests += 1
            self.counters.prefix_queries += request.num_tokens
            local = hit if self.transfers is None else self.transfers.num_local(request)
            if self.connections is not None:
                local = self.connections.num_local(request, local)
            self.counters.prefix_hits += local
            if self.transfers is not None or self.connections is not None:
                self.counters.external_queries += request.num_tokens - local
                self.counters.external_hits += hit - local

    def uncount_hit(self, request: Request) -> None:
        """Undo the count of a hit whose K/V the request's first step was to load, and which has not
        come.
        """
        if request.num_preemptions == 0 and request.num_cached_tokens is not None:
            self.counters.external_hits -= request.num_unloaded_tokens
            request.num_cached_tokens -= request.num_unloaded_tokens

    def preempt(self, request: Request) -> None:
        """Take the request's row and blocks away. It keeps its output, and later computes again
        what is no longer cached.
        """
        self._leave_row(request)
        request.num_preemptions += 1
        request.preempted_times.append(self.now)
        self.counters.num_preemptions += 1
        if request.state is not State.IDLE:
            request.state = State.PREEMPTED
            self.waiting.add(request)

    def pause(self, request: Request, stop: Stop) -> FinishedRequest | None:
        """Make a resumable request that stopped idle until it has input. Returns its final state if
        the next input ends it now.
        """
        if self.memory.states is not None or request.adapter:
            # its recurrent state may be that of a later token; others may need its adapter's slot
            self._leave_row(request)
        self._leave_steps(request)
        streaming_input.pause(request, stop)
        return self.take_input(request)

    def take_input(self, request: Request) -> FinishedRequest | None:
        """Apply the next input of an idle request, if any: the request is resumed, or it ends."""
        if not request.pending_input:
            return None
        given = request.pending_input.pop(0)
        finished = streaming_input.end_of_input(request, given, self.max_len)
        if finished is not None:
            self.end(request)
            return finished
        has_row = request.row >= 0
        if has_row:
            self.rows.stops.remove(request)
        # the stop conditions are counted by row and may differ from now on, hence they are taken
        # out and put back
        streaming_input.resume(request, given, self.max_len)
        if has_row:
            self.rows.stops.add(request)
            self.rows.rebuild(request)
            request.state = State.RUNNING
            self.chunked.append(request)
        else:
            request.state = State.PREEMPTED
            self.waiting.add(request)
        return None

    def end(self, request: Request, stop: Stop | None = None) -> None:
        """End a request in any state; stop: with a result, and why."""
        if self.connections is not None:
            # before the blocks are released: the connector may still have them read, by names that
            # blocks of outputs get only now
            if request.row >= 0:
                self.memory.publish(request, request.num_reusable_tokens)
            self.connections.finish(request, stop)
        if request.row >= 0:
            self._leave_row(request)
        elif request.state is not State.IDLE:
            self.waiting.remove(request)
            self.give_up_load(request)
        request.state = State.FINISHED
        if self.encoders is not None:
            self.encoders.remove(request)
        del self.requests[request.handle]

    def change_weights(self) -> None:
        """Name all blocks that are written from now on differently. What a running request has in
        its blocks is of both weights, until it is preempted: nobody else may find it.
        """
        self.weights += 1
        self.reset_encoder_cache()
        for request in self.requests.values():
            self.give_up_load(request)
            # a key of its own, so that even the request itself does not hit these blocks after a
            # preemption
            request.weights = self.weights if request.row < 0 else _OWN_WEIGHTS + request.handle
            self.memory.rename(request)

    def reset_encoder_cache(self) -> None:
        """Drop all outputs of encoders with the next plan."""
        if self.encoders is not None:
            self.encoders.forget_all()

    def give_up_load(self, request: Request) -> None:
        """Take the blocks of a waiting request away that something is loaded into; it may load them
        again.
        """
        if self.transfers is not None:
            self.transfers.give_up(request)
        if self.connections is not None:
            self.connections.give_up(request)
            request.external = None

    def _leave_row(self, request: Request) -> None:
        self._leave_steps(request)
        # first: a block without a key goes to the front of the free list and would be overwritten
        # next
        self.memory.publish(request, request.num_reusable_tokens)
        self.resources.leave(request)
        request.num_computed_tokens = request.num_confirmed_tokens = 0
        request.num_drafts = request.num_drafts_in_flight = 0
        request.is_decoding = False
        request.load = request.external = None
        if request.weights != self.weights:
            request.weights = self.weights
            self.memory.rename(request)

    def _leave_steps(self, request: Request) -> None:
        """Stop scheduling a request, and cancel its results in steps in flight."""
        if request in self.lane:
            self.lane.leave(request)
        elif request in self.chunked:
            self.chunked.remove(request)
        # results that are still to come belong to a row that somebody else may have by then
        for step in self.in_flight:
            step.cancelled.add(request.handle)
