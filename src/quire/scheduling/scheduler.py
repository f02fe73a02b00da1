"""Step 5 of 8 on a request's path: who gets how many tokens in this step, in which blocks.

In: requests (`add`), results of steps (`update`). Out: `StepPlan` for the runner, `SchedulerOutput`
for the engine core.
Before: engine/core/core.py. Next: runner/runner.py.

There are no phases. A request has known tokens and computed tokens, and a step hands out tokens
until they meet; chunked prefill, prefix hits and resumption after preemption are all this one
rule. A request that is only one token behind sits in the decode lane, where steady steps cost
nothing per request. Pure: no clock, no randomness, no I/O; equal calls give equal plans.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection

from quire.errors import RequestError
from quire.params import SamplingParams
from quire.scheduling import streaming_input
from quire.scheduling.block_tables import BlockTables
from quire.scheduling.decode_lane import DecodeLane
from quire.scheduling.in_flight_step import InFlightStep, ScheduledChunk
from quire.scheduling.policy import POLICIES, WaitingQueue, choose_victim
from quire.scheduling.request import NextInput, Reason, Request, State
from quire.scheduling.scheduler_output import (
    FinishedRequest,
    SchedulerOutput,
    StartedRequest,
    collect_outputs,
)
from quire.scheduling.settings import Pause, SchedulerConfig
from quire.scheduling.step import Chunk, StepPlan, StepResult
from quire.scheduling.stop import StopWatch, check_stop, stop_ids


class Scheduler:
    """Invariants are in scheduling/invariants.py, which checks them after every step in the tests.

    Order inside a step: the decode lane first (a stream never waits for somebody's prompt), then
    running requests with more than one token to compute, then waiting ones in the policy's order.
    Memory runs out only for running requests, and then the policy's last one gives its blocks back
    and is recomputed later.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = POLICIES[config.policy]
        self.memory = BlockTables(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            windows=config.windows,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.requests: dict[int, Request] = {}
        self.waiting = WaitingQueue(self.policy)
        self.running: dict[int, Request] = {}
        """By row; idle requests that hold a row included."""
        self.constrained: dict[int, Request] = {}
        """Those of them that have a grammar."""
        self.lane = DecodeLane(config.block_size)
        self.chunked: list[Request] = []
        """Running requests outside the lane that have, or will have, tokens to compute."""
        self.in_flight: deque[InFlightStep] = deque()
        self.pause = Pause.NONE
        self.num_preemptions = 0
        self.prefix_requests = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._free_rows = list(range(config.max_num_seqs))
        self._removed: list[int] = []
        self._entered: dict[int, int] = {}
        """Handle -> computed tokens, of requests whose row the runner has yet to build."""
        self._stops = StopWatch()
        self._num_arrived = 0
        self._next_step = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it could not run even alone (the caller checks
        lengths first); what else a request can raise by its contents it raises here, too.
        """
        if request.num_tokens < 1 or request.num_tokens >= self.config.max_model_len + 1:
            raise RequestError(f"a request of {request.num_tokens} tokens cannot be scheduled")
        streaming_input.limit_length(request, self.config.max_model_len)
        needed = self.memory.num_needed(request.max_total_tokens, self._least_chunk(request))
        if needed > self.config.num_blocks - 1:
            raise RequestError(
                f"a request of up to {request.max_total_tokens} tokens needs {needed} KV blocks, "
                f"the cache has {self.config.num_blocks - 1}"
            )
        request.stop_ids = stop_ids(request)
        self.memory.name(request)
        request.order = self._num_arrived
        self._num_arrived += 1
        self.requests[request.handle] = request
        self.waiting.add(request)

    def abort(self, handle: int) -> bool:
        """End a request in whatever state it is, without an output. False when it has ended
        already.
        """
        request = self.requests.get(handle)
        if request is None:
            return False
        self._end(request)
        return True

    def extend(
        self,
        handle: int,
        token_ids: list[int],
        *,
        resumable: bool,
        params: SamplingParams | None = None,
        needs_host_ids: bool = False,
    ) -> FinishedRequest | None:
        """More input for a resumable request: now if it is idle, else when it stops next. `params`
        hold from this input on (None: those it has).

        The newest sampled token, whose K/V was never computed, is dropped; the other outputs
        become prompt. Without ids and with `resumable` False the request ends instead, and its
        ending is returned if that happens now.
        """
        request = self.requests[handle]
        if not request.resumable:
            raise ValueError(f"request {handle} takes no more input")
        request.pending_input.append(NextInput(token_ids, resumable, params, needs_host_ids))
        return self._take_input(request) if request.state is State.IDLE else None

    # ---- one step

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute. The only method that takes
        blocks.
        """
        if self.pause is Pause.ALL:
            return None
        step = InFlightStep(self._next_step)
        self._run_due(step)
        self._continue_chunked(step)
        if not step.has_preempted:
            self._admit(step, now)
        return self._launch(step)

    def update(self, result: StepResult, now: float = 0.0) -> SchedulerOutput:
        """Learn what the oldest step in flight brought. The only method that finishes requests and
        publishes blocks.
        """
        step = self.in_flight.popleft()
        assert step.step_id == result.step_id, "results must come in the order of the plans"
        failed = step.failed(result.errors) if result.errors else {}
        gone = step.cancelled | failed.keys()
        out = collect_outputs(step, result, dropped=gone)
        for handle, chunk in step.chunks.items():
            if handle not in gone:
                self._confirm(chunk, out)
        self._end_stopped(step, out, gone)
        for handle, text in failed.items():
            self._fail(self.requests[handle], text, out)
        return out

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False while blocks are in use, unless running requests may be
        preempted for it.
        """
        if reset_running_requests:
            for request in list(self.running.values()):
                self._preempt(request)
        return self.memory.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        """Is there a request that a step could advance, or a step in flight?"""
        if self.pause is Pause.ALL:
            return bool(self.in_flight)
        if self.pause is Pause.NEW and not self.in_flight:
            return any(r.state is State.RUNNING for r in self.running.values()) or any(
                r.state is State.PREEMPTED for r in self.waiting
            )
        return bool(self.in_flight or self.waiting or self.lane.members or self.chunked)

    # ---- planning

    def _run_due(self, step: InFlightStep) -> None:
        """Serve the lane's members at a block boundary or at their last token."""
        for request in sorted(self.lane.due(), key=self.policy):
            if request not in self.lane:
                continue  # gave way to an earlier one
            position = self.lane.position(request)
            request.num_computed_tokens = position
            needs_block = position % self.config.block_size == 0
            if needs_block and self._grow(step, request, 1) == 0:
                continue
            if position + 2 >= request.max_total_tokens:
                step.ending[request.handle] = request
            self.lane.reschedule(request)

    def _continue_chunked(self, step: InFlightStep) -> None:
        for request in sorted(self.chunked, key=self.policy):
            if request.state is not State.RUNNING:
                continue  # gave way to an earlier one
            want = self._wanted(step, request, request.num_computed_tokens)
            if want == 0:
                continue
            count = self._grow(step, request, want)
            if count == 0:
                break
            self._plan_chunk(step, request, count)

    def _admit(self, step: InFlightStep, now: float) -> None:
        """Move waiting requests into rows while tokens, rows and blocks last. The first that does
        not fit stops the rest.
        """
        admitted = []
        for request in self.waiting:
            if not self._free_rows or self._budget(step) == 0:
                break
            if self.pause is Pause.NEW and request.state is not State.PREEMPTED:
                continue
            if request.grammar is not None and not request.grammar.is_ready:
                continue
            hit = self.memory.hit(request)
            if self.memory.is_being_written(request, hit):
                continue  # a running request computes the next block: hit it then
            want = self._wanted(step, request, hit)
            cost = self.memory.admission_cost(request, hit, self._least_chunk(request))
            reserved = self.memory.outstanding(self.chunked)
            if want == 0 or cost + reserved > self.memory.pool.num_free:
                break
            self._enter_row(request, hit, now)
            count = self.memory.room(request, want)
            assert count > 0, "the cost of admission left no block"
            self.memory.grow(request, count)
            self._plan_chunk(step, request, count)
            admitted.append(request)
        for request in admitted:
            self.waiting.remove(request)

    def _wanted(self, step: InFlightStep, request: Request, computed: int) -> int:
        """How many tokens the request should get: all it lacks, within the budget and the cap for
        long prompts.
        """
        missing = request.num_tokens - computed
        want = min(missing, self._budget(step))
        cap = self.config.long_prefill_token_threshold
        if cap and self.config.enable_chunked_prefill and len(self.requests) > 1:
            want = min(want, cap)
        if want < missing and not self.config.enable_chunked_prefill:
            return 0
        return want

    def _budget(self, step: InFlightStep) -> int:
        return max(
            0, self.config.max_num_batched_tokens - len(self.lane.members) - step.num_chunk_tokens
        )

    def _grow(self, step: InFlightStep, request: Request, want: int) -> int:
        """Blocks for up to `want` tokens, from victims where none are free; 0 when the request
        itself gave way.
        """
        while True:
            count = self.memory.room(request, want)
            if count == want or (count > 0 and self.config.enable_chunked_prefill):
                break
            victim = choose_victim(self.policy, self.running.values())
            step.forget(victim.handle)
            step.has_preempted = True
            self._preempt(victim)
            if victim is request:
                return 0
        step.new_blocks.setdefault(request.handle, []).extend(self.memory.grow(request, count))
        return count

    def _plan_chunk(self, step: InFlightStep, request: Request, count: int) -> None:
        request.num_computed_tokens += count
        end = request.num_computed_tokens
        step.chunks[request.handle] = ScheduledChunk(
            request, request.row, count, end, samples=end == request.num_tokens
        )

    def _enter_row(self, request: Request, hit: int, now: float) -> None:
        request.row = heapq.heappop(self._free_rows)
        request.state = State.RUNNING
        self.running[request.row] = request
        if request.grammar is not None:
            self.constrained[request.row] = request
        self.chunked.append(request)
        self._stops.add(request)
        self.memory.adopt(request, hit)
        request.num_computed_tokens = request.num_confirmed_tokens = hit
        self._entered[request.handle] = hit
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit
            request.scheduled_time = now
            self.prefix_requests += 1
            self.prefix_queries += request.num_tokens
            self.prefix_hits += hit

    def _launch(self, step: InFlightStep) -> StepPlan | None:
        step.cohort = self.lane.cohort()
        if step.cohort is None and not step.chunks:
            return None
        plan = StepPlan(
            step_id=step.step_id,
            removed=self._removed,
            added=[self.requests[h].new_row(start) for h, start in self._entered.items()],
            new_blocks=[
                grown
                for handle, blocks in step.new_blocks.items()
                if handle not in self._entered
                for grown in blocks
            ],
            decode_rows=step.cohort.rows if step.cohort else [],
            chunks=[Chunk(c.request.row, c.count, c.samples) for c in step.chunks.values()],
        )
        self._removed, self._entered = [], {}
        self._next_step += 1
        self.in_flight.append(step)
        self._advance(step)
        return plan

    def _advance(self, step: InFlightStep) -> None:
        """Move the requests to where the planned step leaves them."""
        if step.cohort is not None:
            self.lane.advance()
        for request in step.ending.values():
            self.lane.leave(request)
        for chunk in step.chunks.values():
            request = chunk.request
            if chunk.samples and not request.needs_host_ids:
                self.chunked.remove(request)
                if request.num_tokens + 1 < request.max_total_tokens:
                    self.lane.join(request)

    # ---- learning

    def _confirm(self, chunk: ScheduledChunk, out: SchedulerOutput) -> None:
        request = chunk.request
        request.num_confirmed_tokens = chunk.end
        self.memory.publish(request, chunk.end)
        if chunk.samples:
            request.is_decoding = True
            request.prompt_logprobs_done = True
            if not request.has_started:
                request.has_started = True
                out.started.append(
                    StartedRequest(
                        request.handle, request.num_cached_tokens or 0, request.scheduled_time
                    )
                )

    def _end_stopped(self, step: InFlightStep, out: SchedulerOutput, gone: Collection[int]) -> None:
        """End the requests that their new tokens stop, looking only where that is possible."""
        suspects = out.requests
        if not self._stops.may_stop(out.token_ids):
            suspects = [*step.ending.values(), *(c.request for c in step.chunks.values())]
            suspects += step.cohort.inspected if step.cohort else []
        for request in suspects:
            if request.handle in gone or not request.is_decoding:
                continue
            try:
                stop = check_stop(request)
            except Exception as error:
                self._fail(request, _said(error), out, error)
                continue
            if stop is None:
                continue
            if request.resumable:
                self._leave_steps(request)
                streaming_input.pause(request, stop)
                ending = self._take_input(request)
            else:
                self._end(request)
                ending = streaming_input.finished(request, stop)
            if ending is not None:
                out.finished.append(ending)

    def _take_input(self, request: Request) -> FinishedRequest | None:
        """Apply the next input of a resting request, if there is one: it goes on, or it ends."""
        if not request.pending_input:
            return None
        given = request.pending_input.pop(0)
        ending = streaming_input.end_of_input(request, given, self.config.max_model_len)
        if ending is not None:
            self._end(request)
            return ending
        has_row = request.row >= 0
        if has_row:
            self._stops.remove(request)
        streaming_input.resume(request, given, self.config.max_model_len)
        if has_row:
            self._stops.add(request)
            request.state = State.RUNNING
            self.chunked.append(request)
            self._removed.append(request.row)
            self._entered[request.handle] = request.num_computed_tokens
        else:
            request.state = State.PREEMPTED
            self.waiting.add(request)
        return None

    def _end(self, request: Request) -> None:
        if request.row >= 0:
            self._leave_row(request)
        elif request.state is not State.IDLE:
            self.waiting.remove(request)
        request.state = State.FINISHED
        del self.requests[request.handle]

    def _fail(
        self, request: Request, text: str, out: SchedulerOutput, fault: Exception | None = None
    ) -> None:
        """End a request with an error; of its blocks nothing more becomes findable."""
        request.num_confirmed_tokens, request.is_decoding = 0, False
        self._end(request)
        out.finished.append(
            FinishedRequest(
                request.handle, Reason.ERROR, None, text, fault, request.num_preemptions
            )
        )

    def _preempt(self, request: Request) -> None:
        """Take row and blocks; the request starts over behind whatever of it stays cached, its
        output kept.
        """
        self._leave_row(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        if request.state is not State.IDLE:
            request.state = State.PREEMPTED
            self.waiting.add(request)

    def _leave_row(self, request: Request) -> None:
        self._leave_steps(request)
        self.memory.publish(request, request.num_reusable_tokens)
        self.memory.release(request)
        self._stops.remove(request)
        self._removed.append(request.row)
        self._entered.pop(request.handle, None)
        heapq.heappush(self._free_rows, request.row)
        del self.running[request.row]
        self.constrained.pop(request.row, None)
        request.row = -1
        request.num_computed_tokens = request.num_confirmed_tokens = 0
        request.is_decoding = False

    def _leave_steps(self, request: Request) -> None:
        """Schedule it no further, and let steps in flight count for nothing."""
        if request in self.lane:
            self.lane.leave(request)
        elif request in self.chunked:
            self.chunked.remove(request)
        for step in self.in_flight:
            step.cancelled.add(request.handle)

    def _least_chunk(self, request: Request) -> int:
        return 1 if self.config.enable_chunked_prefill else request.num_tokens


def _said(error: Exception) -> str:
    """What a request is told when its own stop condition failed."""
    if isinstance(error, RequestError):
        return str(error)
    return "it could not be told whether its output ends here"
