"""Step 4 of 8 on a request's path: the loop that schedules, executes, learns and reports.

In: `EngineCoreRequest` from engine/client.py. Out: `EngineCoreOutputs`, columns of new tokens.
Next: scheduling/scheduler.py decides each step, the executor runs it.

One synchronous core; it keeps up to `depth` steps in flight (1: plain stepping, 2: the next step is
scheduled and launched before the last one's ids are read).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.protocol import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
    LogprobColumns,
    PromptLogprobs,
    SchedulerStats,
    Started,
)
from quire.engine.utility import PauseMode
from quire.errors import NotBuiltYet
from quire.executor.abstract import Executor, LaunchedStep
from quire.runner.step_output import StepOutput
from quire.scheduling.outputs import StepOutputs
from quire.scheduling.request import Request
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import Pause
from quire.scheduling.step import StepPlan, StepResult

logger = logging.getLogger(__name__)


class EngineCore:
    """A scheduler and an executor, stepped by whoever holds the core.

    A failure that concerns one request ends that request with an error; a step that fails as a
    whole ends the requests in it. Neither raises out of `step`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 1,
        log_stats: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._depth = depth
        self._log_stats = log_stats
        self._clock = clock
        self._steps: deque[tuple[StepPlan, LaunchedStep | Exception]] = deque()
        self._refused: list[Finished] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that can never run ends with an error in the next outputs."""
        params = request.sampling_params
        try:
            self.scheduler.add(
                Request(
                    handle=request.handle,
                    prompt_token_ids=request.prompt_token_ids,
                    params=params,
                    seed=request.seed,
                    priority=request.priority,
                    arrival_time=request.arrival_time,
                    cache_salt=request.cache_salt,
                    output_token_ids=list(request.output_token_ids),
                    needs_host_ids=self.executor.needs_host_ids(params),
                    prompt_logprobs_done=request.prompt_logprobs_done,
                )
            )
        except ValueError as error:
            reason = FinishReason.ERROR
            self._refused.append(Finished(request.handle, reason, message=str(error)))

    def abort_requests(self, handles: Sequence[int]) -> None:
        """End requests without an output; handles that have ended already are left alone."""
        for handle in handles:
            self.scheduler.abort(handle)

    @property
    def has_work(self) -> bool:
        """Would `step` bring anything forward?"""
        return bool(self._steps or self._refused or self.scheduler.has_work)

    def step(self) -> EngineCoreOutputs:
        """Launch what can be launched, read the oldest step in flight, report what it brought."""
        while len(self._steps) < self._depth:
            plan = self.scheduler.schedule(self._clock())
            if plan is None:
                break
            self._steps.append((plan, self._launch(plan)))
        if not self._steps:
            return self._outputs(StepOutputs(), None)
        plan, launched = self._steps.popleft()
        brought = self._read(plan, launched)
        return self._outputs(self.scheduler.update(brought.result, self._clock()), brought)

    # what a front end may ask for (engine/utility.py)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached blocks; False while requests hold blocks. `reset_connector`: there is no
        connector, so there is nothing of it to reset.
        """
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Nothing to forget: no media are served."""

    def reset_encoder_cache(self) -> None:
        """Nothing to forget: no media are served."""

    def pause_scheduler(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        """Freeze: nothing is scheduled until `resume_scheduler`; requests may still be added."""
        if mode != "keep" or clear_cache:
            raise NotBuiltYet("mode", mode, "Abort the requests, then pause with mode='keep'.")
        self.scheduler.pause = Pause.ALL

    def resume_scheduler(self) -> None:
        """Go on where `pause_scheduler` stopped."""
        self.scheduler.pause = Pause.NONE

    def is_scheduler_paused(self) -> bool:
        """Whether nothing is scheduled."""
        return self.scheduler.pause is not Pause.NONE

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Refused: memory is not given back yet."""
        raise NotBuiltYet("level", level, "Use pause_scheduler, which stops scheduling.")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Schedule again; there is no memory to take back."""
        self.resume_scheduler()

    def is_sleeping(self) -> bool:
        """Whether scheduling is stopped."""
        return self.is_scheduler_paused()

    def collective_rpc(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a method of every worker, or a function with each worker as first argument."""
        return self.executor.collective_rpc(method, tuple(args), kwargs)

    def profile(self, is_start: bool, prefix: str | None = None) -> None:
        """Refused: the core has no profiler of its own yet."""
        raise NotBuiltYet("profile", is_start, "Use py-spy or torch.profiler around step().")

    def shutdown(self) -> None:
        """End all requests and let go of the device."""
        self.abort_requests(list(self.scheduler.requests))
        self._steps.clear()
        self.executor.shutdown()

    def _launch(self, plan: StepPlan) -> LaunchedStep | Exception:
        try:
            step = self.executor.launch(plan)
            step.sample()
        except Exception as error:
            return error
        return step

    def _read(self, plan: StepPlan, launched: LaunchedStep | Exception) -> StepOutput:
        if not isinstance(launched, Exception):
            try:
                return launched.result()
            except Exception as error:
                launched = error
        logger.error("step %d failed", plan.step_id, exc_info=launched)
        text = f"the step failed: {type(launched).__name__}: {launched}"
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        errors = dict.fromkeys(rows, text)
        return StepOutput(StepResult(plan.step_id, [0] * len(plan.sampled_rows), errors=errors))

    def _outputs(self, learned: StepOutputs, brought: StepOutput | None) -> EngineCoreOutputs:
        refused, self._refused = self._refused, []
        return EngineCoreOutputs(
            handles=list(learned.handles),
            token_ids=list(learned.token_ids),
            finished=refused
            + [
                Finished(end.handle, FinishReason(end.reason), end.stop_reason, end.message)
                for end in learned.endings
            ],
            started=[
                Started(start.handle, start.num_cached_tokens, start.scheduled_time)
                for start in learned.starts
            ],
            logprobs=_columns(brought, learned.kept) if brought else None,
            prompt_logprobs=[
                PromptLogprobs(p.handle, p.token_ids, p.values, p.ranks)
                for p in (brought.prompt_logprobs if brought else ())
            ],
            stats=self._stats() if self._log_stats else None,
            timestamp=self._clock(),
        )

    def _stats(self) -> SchedulerStats:
        scheduler = self.scheduler
        return SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.memory.pool.usage,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
        )


def _columns(brought: StepOutput, kept: list[int] | None) -> LogprobColumns | None:
    """The sampled rows' columns, cut down to those whose tokens count."""
    found: Any = brought.logprobs
    if found is None:
        return None
    places = range(len(brought.result.token_ids)) if kept is None else kept
    where = {row: place for place, row in enumerate(places)}
    taken = [m for m, row in enumerate(found.index) if row in where]
    return LogprobColumns(
        index=[where[found.index[m]] for m in taken],
        token_ids=found.token_ids.numpy()[taken],
        values=found.values.numpy()[taken],
        ranks=found.ranks.numpy()[taken],
        counts=[found.counts[m] for m in taken],
    )
