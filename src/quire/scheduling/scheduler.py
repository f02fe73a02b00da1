"""Step 6 of 8 on a request's path: decide which request gets how many tokens, in which blocks.

In: requests (`add`), results of steps (`update`). Out: `StepPlan` for the runner,
`SchedulerOutput` for the engine core.
Before: engine/core/core.py. Next: runner/runner.py.

There are no phases. A request has known tokens and computed tokens, and steps compute tokens until
the two are equal; chunked prefill, prefix hits, resumption after preemption and the verification of
drafts are all this one rule. A request that lacks only its newest token sits in the decode lane,
where steady steps cost nothing per request. Pure: no clock, no randomness, no I/O; equal calls give
equal plans.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quire.errors import RequestError
from quire.params import SamplingParams
from quire.scheduling.connection import Connection
from quire.scheduling.drafts import record_drafts, verified_drafts
from quire.scheduling.lifecycle import Lifecycle, choose_victim
from quire.scheduling.request import (
    NextInput,
    Reason,
    Request,
    State,
    Stop,
    ends_with_prompt,
    find_stop,
    stop_ids,
)
from quire.scheduling.resources import Resource
from quire.scheduling.scheduler_output import (
    Failure,
    FinishedRequest,
    InFlightStep,
    ScheduledChunk,
    SchedulerOutput,
    StartedRequest,
    append_tokens,
    finished_request,
)
from quire.scheduling.settings import Pause, SchedulerConfig
from quire.scheduling.transfers import Tier
from quire.step.plan import PromptAllowance, StepPlan
from quire.step.result import StepResult


class Scheduler:
    """Invariants are in tests/support/simulation/invariants.py, which checks them after every step
    in the tests.

    Order inside a step: the decode lane first (a stream never waits for the prompt of another
    request), then running requests with more than one token to compute, then waiting ones in the
    policy's order. Memory runs out only for running requests, and then the policy's last one gives
    its blocks back and is recomputed later.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        resources: Sequence[Resource] = (),
        tier: Tier | None = None,
        connection: Connection | None = None,
    ) -> None:
        """resources: further limits on running requests, in addition to tokens, rows and blocks.
        tier: where contents of blocks are kept outside of the pool, if anywhere. connection: what
        brings contents from elsewhere, or sends them there.
        """
        self.config = config
        self._sees_own_step = any(group.kind == "none" for group in config.groups)
        self.pause = Pause.NONE
        self._next_step = 0
        self._life = life = Lifecycle(config, resources, tier, connection)
        self.counters = life.counters
        self.policy, self.memory, self.rows = life.policy, life.memory, life.rows
        self.requests, self.waiting, self.running = life.requests, life.waiting, life.rows.requests
        self.lane, self.chunked, self.in_flight = life.lane, life.chunked, life.in_flight
        self.adapters, self.transfers = life.adapters, life.transfers
        self.connections, self.encoders = life.connections, life.encoders

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could not run even alone (the caller checks
        lengths first). Everything else that a request's contents can raise is raised here as well.
        """
        config = self.config
        if request.num_tokens < 1 or request.num_tokens >= config.max_len + 1:
            raise RequestError(f"a request of {request.num_tokens} tokens cannot be scheduled")
        request.limit_length(config.max_len)
        request.is_indivisible |= self._sees_own_step
        request.is_whole = request.is_indivisible or not config.steps.enable_chunked_prefill
        if request.is_indivisible:
            self._check_indivisible(request)
        self._check_source(request)
        needed = self.memory.num_needed(request)
        if needed > config.num_blocks - 1:
            raise RequestError(
                f"a request of up to {request.max_total_tokens} tokens needs {needed} KV blocks, "
                f"the cache has {config.num_blocks - 1}"
            )
        self._check_media(request)
        request.stop_ids = stop_ids(request)
        request.weights = self._life.weights
        self.memory.compute_keys(request)
        self._life.queue(request)

    def name_adapter(self, request: Request, number: int) -> None:
        """Set the adapter of a waiting request that has no row and no output of another one."""
        assert request.row < 0, "a running request keeps its adapter"
        request.adapter = number
        self.memory.rename(request)

    def change_weights(self) -> None:
        """The model's weights have changed, before the next plan: what is computed from now on
        shares no block with what was computed before.
        """
        self._life.change_weights()

    def abort(self, handle: int) -> bool:
        """End a request in any state, without an output. Returns False if it has already ended."""
        request = self.requests.get(handle)
        if request is None:
            return False
        self._life.end(request)
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
        """Add input to a resumable request: it is used now if the request is idle, else when it
        stops next. `params` apply from this input on (None: unchanged).

        The newest sampled token, whose K/V was never computed, is dropped; the other outputs
        become prompt. Without ids and with `resumable` False the request ends instead, and its
        final state is returned if that happens now.
        """
        request = self.requests[handle]
        if not request.resumable:
            raise ValueError(f"request {handle} takes no more input")
        request.pending_input.append(NextInput(token_ids, resumable, params, needs_host_ids))
        return self._life.take_input(request) if request.state is State.IDLE else None

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks. Returns False while blocks are in use, unless running requests may
        be preempted.
        """
        if reset_running_requests:
            for request in list(self.running.values()):
                self._life.preempt(request)
            for request in self.waiting:
                self._life.give_up_load(request)
        return self.memory.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Drop the outputs of encoders with the next plan; what a running request still needs is
        made again.
        """
        self._life.reset_encoder_cache()

    @property
    def has_work(self) -> bool:
        """Whether a step could advance a request, or a step is in flight."""
        if self.pause is Pause.ALL:
            return bool(self.in_flight)
        if self.pause is Pause.NEW and not self.in_flight:
            return any(r.state is State.RUNNING for r in self.running.values()) or any(
                r.state is State.PREEMPTED for r in self.waiting
            )
        return bool(self.in_flight or self.waiting or self.lane.members or self.chunked)

    def _check_indivisible(self, request: Request) -> None:
        most = self._life.tokens.limit
        if request.resumable:
            raise RequestError("a request whose prompt cannot be split takes no further input")
        if request.max_total_tokens > most:
            raise RequestError(
                f"a request of up to {request.max_total_tokens} tokens computed in one step "
                f"does not fit into {most} tokens (max_num_batched_tokens)"
            )

    def _check_media(self, request: Request) -> None:
        most = self._life.tokens.limit
        for item in request.media:
            start, stop = item.whole or (0, 0)
            if stop - start > most:
                raise RequestError(
                    f"media of {stop - start} tokens computed in one step do not fit into "
                    f"{most} tokens (max_num_batched_tokens)"
                )

    def _check_source(self, request: Request) -> None:
        num_sources = sum(not item.places for item in request.media)
        if self.memory.sources is None and num_sources:
            raise RequestError("an item of media stands at no position of the prompt")
        if self.memory.sources is not None and num_sources != 1:
            raise RequestError(f"this model reads one second content, not {num_sources}")

    # ---- one step

    def schedule(
        self, now: float = 0.0, allowance: PromptAllowance | None = None
    ) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute. The only method that allocates
        blocks. allowance: for its prompts if streams wait for it (None: there is no bound).
        """
        self._life.now = now
        if self.pause is Pause.ALL:
            return None
        step = InFlightStep(self._next_step, planned_at=now)
        self._life.begin_step(allowance)
        self._run_due(step)
        self._continue_chunked(step)
        # memory was just short for requests that already run: a newcomer would take the blocks of
        # the next victim
        if not step.has_preempted:
            self._admit(step, now)
            self._run_ahead(step)
        return self._launch(step)

    def update(self, result: StepResult, now: float = 0.0) -> SchedulerOutput:
        """Take the result of the oldest step in flight. The only method that finishes requests and
        publishes blocks.
        """
        if self.connections is not None:
            self._restart_spoiled(self.connections.connection.take_bad_blocks())
        step = self.in_flight.popleft()
        assert step.step_id == result.step_id, "results must come in the order of the plans"
        if self.encoders is not None and result.failed_encodings:
            self.encoders.fail(step.step_id, result.failed_encodings)
        failed = step.failed(result)
        gone = step.cancelled | failed.keys()
        out = append_tokens(step, result, dropped=gone)
        if self.config.num_drafts:
            record_drafts(step, result, self.lane, gone, self.counters)
            if self.config.reports_drafts:
                out.parts += verified_drafts(step, result, gone)
        for handle, chunk in step.chunks.items():
            if handle not in gone:
                self._confirm(chunk, out)
        self._end_stopped(step, out, gone)
        for handle, failure in failed.items():
            self._fail(self.requests[handle], failure, out)
        return out

    def end_transfers(self, done: Sequence[int], failed: Sequence[int]) -> None:
        """Loads and stores, by their numbers, have ended or failed. Between two plans, as results
        are taken.
        """
        if self.transfers is not None:
            self.transfers.end(done, failed)

    def end_encodings(self, done: Sequence[bytes], failed: Mapping[bytes, str]) -> SchedulerOutput:
        """Outputs of encoders, by the digests of their items, are there, or cannot be made, for the
        reason given, which ends the requests that still need it. Called only where encodings are
        deferred.
        """
        out = SchedulerOutput()
        for request in list(self.requests.values()) if failed else ():
            position = max(request.num_computed_tokens, request.num_hit_tokens)
            ahead = request.media_between(position, request.num_prompt_tokens)
            text = next((failed[i.digest] for i in ahead if i.digest in failed), None)
            if text is not None:
                self._fail(request, Failure(text), out)
        if self.encoders is not None:
            self.encoders.end(done, failed)
        return out

    def _restart_spoiled(self, blocks: Collection[int]) -> None:
        """Preempt the requests that a step has computed from blocks that were not loaded: nothing
        of it counts, and they are computed whole.
        """
        for request in list(self.running.values()) if blocks else ():
            if any(block in blocks for table in request.block_ids for block in table):
                request.is_spoiled = True
                self._life.uncount_hit(request)
                self._life.preempt(request)

    # ---- planning

    def _run_due(self, step: InFlightStep) -> None:
        """Serve the lane's members at a block boundary or at their last token."""
        # in the policy's order, because the first ones preempt the last ones and not the other way
        # around
        for request in sorted(self.lane.due(), key=self.policy):
            if request not in self.lane:
                continue  # preempted for an earlier one
            request.num_computed_tokens = position = self.lane.position(request)
            want = min(self.lane.stride, request.max_total_tokens - 1 - position)
            if request.capacity < position + want:
                kept = position - request.num_drafts_in_flight
                # drafts in flight may be wrong, so the newest position that is certain decides what
                # is never read again
                if request.resumable:  # the next result may stop it, and it goes on from there
                    kept = min(kept, request.num_tokens)
                self.memory.release_unread(request, kept)
                if self._grow(step, request, want, least=1) == 0:
                    continue
            # the step at its end may bring its last token: it leaves the lane, and comes back if
            # drafts were wrong
            if position + self.lane.stride + 1 >= request.max_total_tokens:
                step.ending[request.handle] = request
            self.lane.reschedule(request)

    def _continue_chunked(self, step: InFlightStep) -> None:
        for request in sorted(self.chunked, key=self.policy):
            if request.state is not State.RUNNING:
                continue  # preempted for an earlier one
            # stages would wait for each other's chunks of one prompt: first come those of others
            if self.config.micro_batches > 1 and self._is_in_flight(request):
                continue
            count, drafts = self._next_chunk(request)
            if count == 0:
                continue
            computed = request.num_computed_tokens
            least = count if request.is_whole else request.least_chunk(computed)
            self.memory.release_unread(request, computed)
            fitting = self._grow(step, request, count + drafts, least)
            # the request was its own victim, hence the last of the running in the policy's order:
            # nobody after it has a row any more
            if fitting == 0:
                break
            end = request.end_of_chunk(computed, computed + min(count, fitting))
            self._plan_chunk(step, request, end - computed, max(0, fitting - count))

    def _run_ahead(self, step: InFlightStep) -> None:
        """Have chunks of prompts follow those in flight into the stages that nobody else needs."""
        # a recurrent state that the next chunk writes over is one that the chunk before may be run
        # again from
        if self.config.micro_batches == 1 or self.memory.states is not None:
            return
        for request in sorted(self.chunked, key=self.policy):
            if request.handle in step.chunks or not self._is_in_flight(request):
                continue
            count, _ = self._next_chunk(request)
            if count == 0:
                continue
            computed = request.num_computed_tokens
            # what the chunks in flight read is kept until they have succeeded
            self.memory.release_unread(request, request.num_confirmed_tokens)
            # no one gives blocks back for it: a request that is its own victim would lose what is
            # in flight, again and again
            grown = self.memory.grow(request, count, request.least_chunk(computed))
            if grown is None:
                continue
            fitting, new_blocks = grown
            if new_blocks:
                step.new_blocks.setdefault(request.handle, []).extend(new_blocks)
            end = request.end_of_chunk(computed, computed + fitting)
            self._plan_chunk(step, request, end - computed)

    def _next_chunk(self, request: Request) -> tuple[int, int]:
        """The tokens that a running request outside the lane may compute, and the drafts that it
        may verify after them.
        """
        missing = request.num_tokens - request.num_computed_tokens
        count = self._life.tokens.offer(request, missing) if missing > 0 else 0
        if self.encoders is not None:
            count = self.encoders.reach(request, request.num_computed_tokens, count)
        # drafts follow the newest token: a chunk that does not reach it has nothing to verify
        return count, self._num_drafts(request, count) if 0 < count == missing else 0

    def _is_in_flight(self, request: Request) -> bool:
        """Whether the result of a step with this request is to come."""
        return any(request.handle in step.chunks for step in self.in_flight)

    def _admit(self, step: InFlightStep, now: float) -> None:
        """Move waiting requests into rows while every resource grants them something."""
        admitted = []
        for request in self.waiting:
            if self._life.resources.is_exhausted:
                break
            if self.pause is Pause.NEW and request.state is not State.PREEMPTED:
                continue
            if not self._life.may_enter(request):
                continue
            # looked up at every attempt: what it will hit may have been published, or evicted,
            # since the last one
            self.memory.find_hit(request)
            if self.memory.is_being_written(request):
                continue  # a running request computes its next block: wait and hit it then
            if self.transfers is not None and self.transfers.begin_load(
                request, self._life.blocks.outstanding
            ):
                continue
            if self.connections is not None and not self.connections.admits(
                request, self._life.blocks.outstanding
            ):
                continue
            count, holds_back_others = self._life.resources.offer(request)
            if holds_back_others:
                break
            if count == 0:
                continue
            self._life.enter_row(request, now)
            # the resources have granted this, and nothing allocates between the offer and here
            grown = self.memory.grow(request, count)
            assert grown is not None, "the cost of admission left no block"
            count = grown[0]
            if request.media:
                first = request.num_computed_tokens
                count = request.end_of_chunk(first, first + count) - first
            if self.connections is not None:
                self.connections.entered(request)
            self._plan_chunk(step, request, count)
            admitted.append(request)
        # not inside the loop above, which walks over this list
        for request in admitted:
            self.waiting.remove(request)

    def _num_drafts(self, request: Request, count: int) -> int:
        """Return how many drafts the request verifies after `count` tokens outside the lane, where
        the number of ready drafts is known.
        """
        # one place stays for the token that the verification itself samples
        longest = request.max_total_tokens - 1 - request.num_tokens
        tokens = self._life.tokens
        return max(0, min(request.num_drafts, tokens.left - count, tokens.drafts_left, longest))

    def _grow(self, step: InFlightStep, request: Request, want: int, least: int) -> int:
        """Allocate blocks for up to `want` tokens, preempting others if there are not enough for
        `least`. Returns the number of tokens; 0 if the request itself was preempted.
        """
        # one victim at a time: each may already give enough, and a preempted request computes all
        # of it again
        while (grown := self.memory.grow(request, want, least)) is None:
            if self.memory.give_up_snapshots(self.running.values()):
                continue  # or a request that is alone would make them again and again
            victim = choose_victim(self.policy, self.running.values(), request)
            step.forget(victim.handle)
            step.has_preempted = True
            self._life.preempt(victim)
            if victim is request:
                return 0
        count, new_blocks = grown
        if new_blocks:
            step.new_blocks.setdefault(request.handle, []).extend(new_blocks)
        return count

    def _plan_chunk(
        self, step: InFlightStep, request: Request, count: int, num_drafts: int = 0
    ) -> None:
        self._life.tokens.take(request, count, num_drafts)
        if self.encoders is not None and request.media:
            self.encoders.use(request, request.num_computed_tokens, count)
        end = request.num_computed_tokens + count
        request.num_computed_tokens = end + num_drafts
        request.num_drafts_in_flight += num_drafts
        request.num_state_updates += 1
        samples = request.generates and end == request.num_tokens
        step.chunks[request.handle] = ScheduledChunk(
            request, request.row, count, end, samples, num_drafts
        )

    def _launch(self, step: InFlightStep) -> StepPlan | None:
        step.cohort = self.lane.cohort()
        has_transfers = self.transfers is not None and self.transfers.has_changes
        has_encodings = self.encoders is not None and self.encoders.has_encodings
        if step.cohort is None and not step.chunks and not has_transfers and not has_encodings:
            return None
        # the message of a new row has its whole table
        grown = [b for h, new in step.new_blocks.items() if not self.rows.is_new(h) for b in new]
        removed, added = self.rows.take_changes()
        step.cohort_drafts = self.lane.plan_drafts(self._life.tokens.drafts_left)
        copies, zero_blocks = self.memory.take_state_changes()
        adapter_loads = [] if self.adapters is None else self.adapters.take_loads()
        loads, stores = ([], []) if self.transfers is None else self.transfers.take_changes()
        encoders = self.encoders
        dropped, encodings = ([], []) if encoders is None else encoders.take_changes(step.step_id)
        plan = StepPlan(
            step_id=step.step_id,
            removed=removed,
            added=added,
            new_blocks=grown,
            decode_rows=step.cohort.rows if step.cohort else [],
            chunks=[chunk.message() for chunk in step.chunks.values()],
            copies=copies,
            zero_blocks=zero_blocks,
            decode_drafts=step.cohort_drafts,
            adapter_loads=adapter_loads,
            loads=loads,
            stores=stores,
            dropped_outputs=dropped,
            encodings=encodings,
            allowance=self._life.tokens.allowance,
        )
        self._next_step += 1
        self.in_flight.append(step)
        self._advance(step)
        return plan

    def _advance(self, step: InFlightStep) -> None:
        self.lane.advance()
        for request in step.ending.values():
            self.lane.leave(request)
        for chunk in step.chunks.values():
            request = chunk.request
            # the lane plans ahead by one token a step: who verifies drafts outside of it, whose
            # next input the host makes from the ids, or whose prompt must not be torn, stays out
            # until the result is known
            waits_for_result = chunk.num_drafts or request.needs_host_ids or request.is_protected
            if chunk.samples and not waits_for_result:
                self.chunked.remove(request)
                if request.num_tokens + 1 < request.max_total_tokens:
                    self.lane.join(request)

    # ---- results

    def _confirm(self, chunk: ScheduledChunk, out: SchedulerOutput) -> None:
        request = chunk.request
        request.num_confirmed_tokens = chunk.end
        self.memory.publish(request, chunk.end)
        if self.encoders is not None and request.media:
            self.encoders.confirm(request, chunk.end)
        if chunk.samples:
            request.is_decoding = True
            request.prompt_logprobs_done = True
            self._note_start(request, out)
        elif ends_with_prompt(request):
            self._note_start(request, out)
            self._life.end(request)
            out.finished.append(finished_request(request, Stop(Reason.STOP)))

    @staticmethod
    def _note_start(request: Request, out: SchedulerOutput) -> None:
        if not request.has_started:
            request.has_started = True
            cached = request.num_cached_tokens or 0
            times = request.scheduled_time, request.queued_time
            out.started.append(StartedRequest(request.handle, cached, *times, request.adapter))

    def _end_stopped(self, step: InFlightStep, out: SchedulerOutput, gone: Collection[int]) -> None:
        """End the requests that their new tokens stop, checking only those that may."""
        # a look at all new ids in one call says that nearly always no stop is among them; then only
        # the requests that may end for another reason are visited
        suspects = out.requests
        if not self.rows.stops.may_stop(out.token_ids):
            suspects = [*step.ending.values(), *(c.request for c in step.chunks.values())]
            suspects += step.cohort.inspected if step.cohort else []
        num_new = out.num_new() if suspects else {}
        for request in suspects:
            if request.handle in gone or not request.is_decoding:
                continue
            try:
                stop, dropped = find_stop(request, num_new.get(request.handle, 1))
            except Exception as error:
                self._fail(request, Failure(_error_text(error), fault=error), out)
                continue
            if stop is None:
                continue
            if dropped:
                out.drop_last(request.handle, dropped)
            if request.resumable:
                finished = self._life.pause(request, stop)
            else:
                self._life.end(request, stop)
                finished = finished_request(request, stop)
            if finished is not None:
                out.finished.append(finished)
        for handle, request in step.ending.items():
            if handle not in gone and request.is_decoding:
                self.chunked.append(request)  # drafts were wrong, so this was not its last token

    def _fail(self, request: Request, failure: Failure, out: SchedulerOutput) -> None:
        """End a request with an error; no more of its blocks become findable."""
        # whatever made it fail may have written nonsense into its last blocks
        request.num_confirmed_tokens, request.is_decoding = 0, False
        self._life.end(request)
        end = FinishedRequest(request.handle, Reason.ERROR, None, failure.text, failure.fault)
        end.num_nans = failure.num_nans
        end.num_preemptions = request.num_preemptions
        end.preempted_times = request.preempted_times
        out.finished.append(end)


def _error_text(error: Exception) -> str:
    """The message of a request whose own stop condition failed."""
    if isinstance(error, RequestError):
        return str(error)
    return "the check whether its output ends here failed"
