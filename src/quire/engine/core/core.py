"""Step 5 of 8 on a request's path: the loop that schedules, executes, updates and reports.

In: `EngineCoreRequest` from engine/client/client.py. Out: `EngineCoreOutputs`, columns of new
tokens. Next: scheduling/scheduler.py decides each step, the executor runs it.

The core is synchronous. It keeps up to `depth` steps in flight (1: plain stepping, 2: the next step
is scheduled and launched before the last one's ids are read, more: for stages of a model).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from quire.engine.core.control import CoreControl
from quire.engine.core.fault_isolation import FaultBoundary, GuardedStep
from quire.engine.core.features import CoreFeature, Masked, overridden
from quire.engine.core.features.plain_features import plain_features
from quire.engine.core.step_pace import StepPace
from quire.engine.wire.declared_types import check_message
from quire.engine.wire.direct_requests import DirectRequests
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from quire.engine.wire.output_parts import Finished, FinishReason, Started
from quire.errors import EngineDeadError, InvalidParameter, RequestError
from quire.executor.abstract import Executor, LaunchedStep
from quire.params import SamplingParams
from quire.scheduling.request import Reason, Request
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.scheduler_output import FinishedRequest, SchedulerOutput, handles_of
from quire.step.columns import AnyPart, LogprobColumns, RunnerOutput
from quire.step.plan import StepPlan

if TYPE_CHECKING:
    from quire.distributed.expert_exchange import Rounds

logger = logging.getLogger(__name__)

_PREREQUISITE_NAP_S = 0.01
"""The longest delay of new input while every request waits for a prerequisite."""

_WARN_AGAIN_S = 60.0


class EngineCore(CoreControl):
    """A scheduler and an executor, stepped by the core's owner; its control methods are in
    engine/core/control.py.

    A failure that concerns one request ends that request with an error and does not affect the
    others (engine/core/fault_isolation.py). `step` raises only if the device runs no step at all.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 1,
        log_stats: bool = True,
        lock_step: Rounds | None = None,
        has_own_memory: bool = False,
        features: Sequence[CoreFeature] | None = None,
        pace: StepPace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            scheduler,
            executor,
            keeps_weights=lock_step is not None,
            has_own_memory=has_own_memory,
            features=plain_features(scheduler) if features is None else tuple(features),
        )
        self._depth = depth
        self._log_stats = log_stats
        self._clock = clock
        self.lock_step = lock_step
        """The rounds of a core that shares experts with others; None: it steps independently."""
        masks = [feature.masks for feature in self.features if feature.masks is not None]
        assert len(masks) <= 1, "one feature says what rows may draw"
        self._constrained_masks = masks[0] if masks else None
        self._boundary = FaultBoundary(executor, self._masks)
        self._poll = overridden(self.features, "poll")
        self._is_busy = overridden(self.features, "is_busy")
        self._planned = overridden(self.features, "planned")
        self._completed = overridden(self.features, "completed")
        self._updated = overridden(self.features, "updated")
        self._take_parts = overridden(self.features, "take_parts")
        self._report = overridden(self.features, "report")
        self._steps: deque[GuardedStep] = deque()
        self._pace = pace
        self._refused: list[Finished] = []
        self._direct = DirectRequests()
        self._counted = (0,) * 6
        self._counted_drafts: tuple[int, list[int]] = 0, []
        self._warned_of_nans_at: float | None = None
        self.on_launch: Callable[[Collection[int]], None] | None = None
        """Called before each launch with the requests in the steps that have not been read."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that can never run ends with an error in the next outputs.

        A request without a handle, which no front end has made, gets one, and its outputs have its
        `request_id`. Raises InvalidType for a field that has a value of another type than its own,
        InvalidParameter for the handle of another request; then nothing is queued.
        """
        if request.handle.__class__ is int and request.handle >= 0:
            check_message(request)
        else:
            request = self._direct.take(request)
        self.take_in(request)

    def take_in(self, request: EngineCoreRequest) -> None:
        """As `add_request`, for a decoded request: with a handle, and fields of their types."""
        # a core that was asked to drain or failed an update answers at once instead of queueing
        # what never runs
        if self.refusal is not None:
            self._refuse(request.handle, self.refusal)
            return
        if request.continues:
            self._continue(request)
            return
        if request.handle in self.scheduler.requests:
            raise InvalidParameter("handle", request.handle, "another request has it")
        params = request.params
        concerned = self._concerned(request)
        try:
            own = Request(
                handle=request.handle,
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                seed=request.seed,
                priority=request.priority,
                arrival_time=request.arrival_time,
                queued_time=self._clock(),
                cache_salt=request.cache_salt,
                output_token_ids=list(request.output_token_ids),
                needs_host_ids=self._needs_host_ids(request, concerned),
                prompt_logprobs_done=request.prompt_logprobs_done,
                resumable=request.resumable,
            )
            self._queue(own, request, concerned)
        except RequestError as error:
            self._refuse(request.handle, str(error))
        except EngineDeadError:
            raise
        except Exception:
            logger.exception("request %d was not taken", request.handle)
            self._refuse(request.handle, "the request could not be taken in")

    def _queue(
        self, own: Request, request: EngineCoreRequest, concerned: Sequence[CoreFeature]
    ) -> None:
        asked = []
        try:
            for feature in concerned:
                # before the call: `prepare` may fail half-way, and what it took is given back as
                # well
                asked.append(feature)
                feature.prepare(own, request)
            self.scheduler.add(own)
        except BaseException:
            for feature in asked:
                feature.dismiss(own)
            raise

    def _continue(self, request: EngineCoreRequest) -> None:
        """Add input to a request, unless it has ended meanwhile."""
        if request.handle not in self.scheduler.requests:
            return
        params = request.params
        assert isinstance(params, SamplingParams), "the prompt of a pooling request is whole"
        ending = self.scheduler.extend(
            request.handle,
            request.prompt_token_ids,
            resumable=request.resumable,
            params=params if request.prompt_token_ids else None,
            needs_host_ids=self._needs_host_ids(request, self._concerned(request)),
        )
        if ending is not None:
            self._refused.append(_finished(ending))

    def _masks(self, plan: StepPlan, launched: LaunchedStep) -> Masked:
        """The masks of a step; None where no running request is constrained."""
        if self._constrained_masks is None or not self.scheduler.rows.constrained:
            return None
        return self._constrained_masks(plan, launched)

    def _concerned(self, message: EngineCoreRequest) -> list[CoreFeature]:
        """The features that concern a request: none, for nearly all requests."""
        params = message.params
        found = {
            feature: None
            for feature in self.features
            for name in feature.fields
            if getattr(message, name, None) is not None or getattr(params, name, None) is not None
        }
        return list(found)

    def _needs_host_ids(
        self, message: EngineCoreRequest, concerned: Collection[CoreFeature]
    ) -> bool:
        """Whether the next step of a request needs its ids on the host: such a request is not
        scheduled ahead. Raises RequestError for a kind of request that the model has no head for.
        """
        # with one step in flight the ids of the last one are always known
        if self._depth > 1 and any(feature.follows_ids for feature in concerned):
            return True
        return self.executor.needs_host_ids(message.params)

    def abort_requests(self, handles: Sequence[int | str]) -> None:
        """Abort requests without an output, by their handles or, where they have come without one,
        by their names; those that have already ended are ignored.
        """
        own = self._direct.handles_of(handles)
        for handle in own:
            self.scheduler.abort(handle)
        self._direct.drop(own)

    @property
    def has_work(self) -> bool:
        if self._steps or self._refused or self.scheduler.has_work:
            return True
        return any(is_busy() for is_busy in self._is_busy)

    @property
    def may_end(self) -> bool:
        """Whether nothing is left that the end of the core waits for."""
        if self._steps or self._refused or self.scheduler.has_work:
            return False
        return not any(feature.delays_end() for feature in self.features)

    @property
    def max_handles_in_flight(self) -> int:
        """The most requests that can be in steps that have not been read."""
        return self._depth * self.scheduler.rows.count

    def step(self) -> EngineCoreOutputs:
        """Launch what can be launched, read the oldest step in flight, and return its outputs."""
        # first what has ended outside: a request that became ready is planned in this turn
        for poll in self._poll:
            self._refused += [_refusal(*failed) for failed in poll()]
        # then the device gets work before results are read, so that it never waits for the host
        while len(self._steps) < self._depth:
            allowance = None if self._pace is None else self._pace.allowance
            plan = self.scheduler.schedule(self._clock(), allowance)
            # also without a plan: what waiting requests lack begins to be read here
            for planned in self._planned:
                planned(plan)
            if plan is None:
                break
            if self.on_launch is not None:
                # before the launch: if the process dies in it, the journal outside knows which
                # requests to suspect
                self.on_launch(handles_of(self.scheduler.in_flight))
            self._steps.append(self._boundary.launch(plan))
        if not self._steps:
            self._wait_for_prerequisite()
            return self.report()
        # the oldest one: results are taken in the order of the plans
        runner_output = self._steps.popleft().result()
        # before the update, which takes from a connection the blocks that this step could not load
        for completed in self._completed:
            completed()
        now = self._clock()
        if self._pace is not None:
            # before the update, which forgets the step
            self._pace.note(self.scheduler.in_flight[0], now)
        outputs = self._outputs(self.scheduler.update(runner_output.result, now), runner_output)
        # calls that need a quiet moment (sleep, weights, snapshots) run when their condition holds
        # after this update
        if self._waiting:
            self._settle()
        return outputs

    def report(self) -> EngineCoreOutputs:
        """Outputs without a step: the queues' lengths, and requests that ended without one."""
        return self._outputs(SchedulerOutput(), None)

    def step_with_batch_queue(self) -> EngineCoreOutputs:
        """The same as `step`, which already keeps up to `depth` steps in flight."""
        return self.step()

    def execute_model(self, plan: StepPlan) -> RunnerOutput:
        """Run one planned step in the fault boundary and read it; no scheduler update."""
        return self._boundary.launch(plan).result()

    def execute_dummy_batch(self) -> bool:
        """Take part in a round of the cores that share experts with this one, without tokens of its
        own. Returns False when no core has tokens left, and for a core without such rounds.
        """
        return self.lock_step is not None and self.lock_step.idle_round(self.has_work)

    def shutdown(self) -> None:
        self.abort_requests(list(self.scheduler.requests))
        self._steps.clear()
        for feature in self.features:
            feature.close()
        self.executor.shutdown()

    def _wait_for_prerequisite(self) -> None:
        """Sleep briefly when nothing can run, until a request's prerequisite may be ready."""
        for request in self.scheduler.waiting:
            for prerequisite in request.prerequisites:
                if not prerequisite.is_ready:
                    prerequisite.wait(_PREREQUISITE_NAP_S)
                    return
        for feature in self.features:
            feature.wait(_PREREQUISITE_NAP_S)

    def _abort_up_to(self, order: int) -> None:
        for handle, request in list(self.scheduler.requests.items()):
            if request.order <= order:
                self.scheduler.abort(handle)
                self._refused.append(Finished(handle, FinishReason.ABORT))

    def _fail_all(self, text: str) -> None:
        for handle in list(self.scheduler.requests):
            self.scheduler.abort(handle)
            self._refuse(handle, text)

    def _refuse(self, handle: int, text: str) -> None:
        self._refused.append(_refusal(handle, text))

    def _outputs(
        self, scheduler_output: SchedulerOutput, runner_output: RunnerOutput | None
    ) -> EngineCoreOutputs:
        refused, self._refused = self._refused, []
        for updated in self._updated:
            updated()
        for end in scheduler_output.finished:
            if end.fault is not None:
                logger.error("request %d failed: %s", end.handle, end.message, exc_info=end.fault)
            if end.num_nans:
                self._warn_of_nans(end)
        outputs = EngineCoreOutputs(
            # copied: in steady decode it is the lane's own list, which later steps use as well
            handles=list(scheduler_output.handles),
            token_ids=list(scheduler_output.token_ids),
            counts=scheduler_output.counts,
            finished=refused + [_finished(ending) for ending in scheduler_output.finished],
            started=[Started(*start) for start in scheduler_output.started],
            logprobs=_columns(runner_output, scheduler_output.kept) if runner_output else None,
            parts=[
                *(_parts(runner_output, scheduler_output) if runner_output else ()),
                *(part for take_parts in self._take_parts for part in take_parts()),
            ],
            stats=self._stats() if self._log_stats else None,
            timestamp=self._clock(),
            weight_version=self.weight_version,
        )
        if self._direct.names:
            self._direct.name(outputs)
        return outputs

    def _warn_of_nans(self, end: FinishedRequest) -> None:
        """Log a warning, at most once in `_WARN_AGAIN_S`: a model of NaN fails every request."""
        now = self._clock()
        if self._warned_of_nans_at is None or now - self._warned_of_nans_at > _WARN_AGAIN_S:
            self._warned_of_nans_at = now
            logger.warning(
                "Request %d failed: %d of its logits are NaN. Others that fail so in the next %g s "
                "are not logged.",
                *(end.handle, end.num_nans, _WARN_AGAIN_S),
            )

    def _stats(self) -> SchedulerStats:
        scheduler = self.scheduler
        counted = (
            scheduler.counters.prefix_queries,
            scheduler.counters.prefix_hits,
            scheduler.counters.num_preemptions,
            scheduler.counters.prefix_requests,
            scheduler.counters.external_queries,
            scheduler.counters.external_hits,
        )
        # differences, which the front end adds up: its totals outlive a core that is restarted
        since = [now - then for now, then in zip(counted, self._counted, strict=True)]
        self._counted = counted
        queue = len(scheduler.running), len(scheduler.waiting), scheduler.memory.pool.usage
        queries, hits, preemptions, requests, external_queries, external_hits = since
        stats = SchedulerStats(*queue, queries, hits, preemptions, requests)
        stats.external_prefix_cache_queries = external_queries
        stats.external_prefix_cache_hits = external_hits
        stats.num_deferred_reqs = scheduler.waiting.num_deferred
        for report in self._report:
            report(stats)
        if scheduler.config.num_drafts:
            stats.num_draft_tokens, stats.num_accepted = self._draft_counts()
        return stats

    def _draft_counts(self) -> tuple[int, list[int]]:
        """Drafts verified since the last report, and by n how often exactly n were right."""
        counters = self.scheduler.counters
        count = counters.num_drafts - self._counted_drafts[0]
        if not count:
            return 0, []
        before = self._counted_drafts[1] or [0] * len(counters.num_accepted)
        self._counted_drafts = counters.num_drafts, list(counters.num_accepted)
        return count, [n - m for n, m in zip(counters.num_accepted, before, strict=True)]


def _refusal(handle: int, text: str) -> Finished:
    return Finished(handle, FinishReason.ERROR, message=text)


def _finished(ending: FinishedRequest) -> Finished:
    reason = FinishReason(ending.reason)
    return Finished(
        ending.handle,
        reason,
        ending.stop_reason,
        ending.message,
        ending.num_preemptions,
        ending.is_in_text,
        list(ending.preempted_times),
        ending.num_nans,
    )


def _parts(runner_output: RunnerOutput, scheduler_output: SchedulerOutput) -> list[AnyPart]:
    """The parts of both, but for results of requests that do not end in this step: a request that
    was preempted meanwhile gets its result from a later step.
    """
    if not runner_output.parts:
        return [*scheduler_output.parts]
    endings = scheduler_output.finished
    ended = {ending.handle for ending in endings if ending.reason is not Reason.ERROR}
    kept = [one for one in runner_output.parts if not one.comes_at_end or one.handle in ended]
    return [*kept, *scheduler_output.parts]


def _columns(runner_output: RunnerOutput, kept: list[int] | None) -> LogprobColumns | None:
    """The sampled rows' columns, cut down to those whose tokens count."""
    found = runner_output.logprobs
    if found is None or kept is None:
        return found
    return found.at({row: place for place, row in enumerate(kept)})
