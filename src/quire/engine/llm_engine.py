"""`LLMEngine`: requests in, `step()`, outputs out; the synchronous interface of one engine.

It covers the caller's side of the core: input processing (step 3, input_processor.py) before it,
output processing (step 8, output_processor.py) after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from quire.config.args.engine_args import EngineArgs
from quire.config.plan import EnginePlan
from quire.engine.arguments import (
    check_executor_class,
    refuse_given,
    refuse_keywords,
    require_plan,
)
from quire.engine.arguments import request_ids as ids_of
from quire.engine.client.client import EngineCoreClient
from quire.engine.control_verbs import BlockingControl
from quire.engine.frontend.engine_attributes import EngineAttributes
from quire.engine.frontend.frontend import FrontEnd, build_front_end, read_tokenizer
from quire.engine.frontend.output_processor import AnyOutput
from quire.engine.stats.loggers import StatLoggerFactory, with_log_stats, with_stat_loggers
from quire.engine.wire.control_calls import Utility
from quire.environment import read_environment
from quire.executor.packed_file import preparation
from quire.hardware.prepared_memory import prepare
from quire.hardware.torch_library import wait_for_torch
from quire.lora.request import LoRARequest
from quire.params import PoolingParams, SamplingParams, checks
from quire.request_options import RequestOptions
from quire.start_up import quick_imports

T = TypeVar("T")


class LLMEngine(EngineAttributes, BlockingControl):
    """Serves requests step by step in the calling thread; not thread-safe. With
    `multiprocess_mode`, and always when the plan has several cores, steps run in processes of their
    own. `sleep`, `collective_rpc` and the like are verbs (control_verbs.py).

    `vllm_config` is the plan from `EngineArgs.create_engine_config()`. `stat_loggers` record every
    step (engine/stats/loggers.py). `front_end`, if given, is used instead of building one.
    `log_stats` rules over the plan's. `executor_class` is the plan's own or None, `mm_registry`
    None; `usage_context` is for reports of usage, which are never sent.
    """

    front_end: FrontEnd[EngineCoreClient]

    def __init__(
        self,
        vllm_config: EnginePlan | None = None,
        executor_class: Any = None,
        log_stats: bool | None = None,
        aggregate_engine_logging: bool = False,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        mm_registry: Any = None,
        multiprocess_mode: bool = False,
        *,
        front_end: FrontEnd[EngineCoreClient] | None = None,
    ) -> None:
        refuse_given(mm_registry=mm_registry)
        check_executor_class(executor_class, vllm_config)
        if front_end is None:
            plan = with_log_stats(require_plan(vllm_config), log_stats)
            make = _launched_front_end if multiprocess_mode else _front_end_of_one
            front_end, log_stats = make(plan, stat_loggers, aggregate_engine_logging), None
        self.front_end = front_end
        self._is_logging = self.front_end.log_stats if log_stats is None else log_stats
        self._ready: list[AnyOutput] = []
        self._logged_at = time.monotonic()
        self._log_interval_s = read_environment().log_stats_interval_s

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EnginePlan,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
    ) -> Self:
        """Make an engine from a plan; `disable_log_stats` rules over the plan's."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Make an engine from arguments. Raises RequestError for these, LoadError for the model."""
        front_end = None
        is_elsewhere = engine_args.data_parallel_backend == "ray"
        if enable_multiprocessing or engine_args.is_copied or is_elsewhere:
            front_end = _launched_front_end(engine_args, stat_loggers)
        plan = None
        if front_end is None:
            with quick_imports():
                plan = engine_args.create_engine_config()
        return cls(
            plan,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            aggregate_engine_logging=engine_args.aggregate_engine_logging,
            front_end=front_end,
        )

    # requests

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        **unbuilt: Any,
    ) -> str:
        """Queue a request and return the engine's own id for it; outputs carry `request_id`.

        `arrival_time` is wall-clock time in seconds (default: now). An `EngineCoreRequest` of
        `input_processor.process_inputs` may stand in place of a prompt; its own id and parameters
        rule, and `prompt_text` is shown as its prompt. Raises subclasses of RequestError; then the
        engine is unchanged.
        """
        if unbuilt:
            refuse_keywords(unbuilt)
        options = RequestOptions(
            arrival_time=arrival_time,
            priority=priority,
            prompt_text=prompt_text,
            tokenization_kwargs=tokenization_kwargs,
            lora_request=lora_request,
            trace_headers=trace_headers,
        )
        return self.front_end.add(request_id, prompt, params, options).internal_id

    def step(self) -> list[Any]:
        """Run one step of the core and return the outputs that are due, `RequestOutput`s or
        `PoolingRequestOutput`s, those of aborted requests first. Without unfinished requests this
        returns [] and costs nothing.
        """
        ready, self._ready = self._ready, []
        if self.front_end.next_deadline is not None:
            ready += self.front_end.expire(time.monotonic()).outputs
        # what is there is given out before a step is waited for
        if ready or not self.has_unfinished_requests():
            return ready
        outputs = self.front_end.take_in(self.front_end.client.get_output()).outputs
        if self._is_logging:
            self.do_log_stats_with_interval()
        return outputs

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests by the callers' ids, or by the engine's own if `internal`; unknown ids are
        ignored. The next `step()` returns their final outputs, with what was generated.
        """
        ids = ids_of(request_ids)
        self._ready += self.front_end.abort(ids, internal=checks.flag("internal", internal)).outputs

    def discard_requests(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """Abort requests by callers' ids, or by ours if `internal`, and drop their outputs."""
        self.front_end.abort(ids_of(request_ids), internal=internal)

    def discard_all(self) -> None:
        self.front_end.abort(self.front_end.outputs.unfinished_ids(), internal=True)
        self._ready.clear()

    def has_unfinished_requests(self) -> bool:
        """Whether the core has work to do."""
        return self.front_end.outputs.num_unfinished > 0

    def has_unfinished_requests_dp(self, has_unfinished: bool) -> bool:
        """Whether any data-parallel engine has work; this engine is the only one."""
        return has_unfinished

    # the engine as a whole

    @property
    def model_executor(self) -> Any:
        """The executor of a core in this process. Raises AttributeError where it is in another."""
        client: Any = self.front_end.client
        try:
            return client.engine_core.executor
        except AttributeError:
            text = "The core is in another process: use collective_rpc, or keep it in this one."
            raise AttributeError(text, name="model_executor", obj=self) from None

    @model_executor.deleter
    def model_executor(self) -> None:
        """End the engine: programs delete its executor to have the memory back."""
        self.close()

    def do_log_stats(self) -> None:
        """Log one line of throughput and load, if statistics are on."""
        if self._is_logging:
            self._logged_at = time.monotonic()
            self.front_end.stats.log()

    def do_log_stats_with_interval(self) -> None:
        """Log the line of `do_log_stats` QUIRE_LOG_STATS_INTERVAL seconds after the last one."""
        if time.monotonic() - self._logged_at >= self._log_interval_s:
            self.do_log_stats()

    def close(self) -> None:
        """Abort every request and release the memory; the engine cannot be used afterwards."""
        self.discard_all()
        self.front_end.shutdown()

    def _call(self, call: Utility[T]) -> T:
        with self.front_end.noted(call):
            answer = self.front_end.client.call(call)
        self.front_end.note_call(call, answer)
        return answer


def _launched_front_end(
    plan: EnginePlan | EngineArgs,
    stat_loggers: Sequence[StatLoggerFactory] | None,
    is_log_aggregated: bool = False,
) -> FrontEnd[EngineCoreClient]:
    from quire.engine.launcher import launch_front_end  # sockets, which one process does not need

    return launch_front_end(plan, stat_loggers, is_log_aggregated)


def _front_end_of_one(
    plan: EnginePlan, stat_loggers: Sequence[StatLoggerFactory] | None, is_log_aggregated: bool
) -> FrontEnd[EngineCoreClient]:
    """Build a front end with the core in this process, unless the plan has several cores."""
    if plan.parallel.mesh.dp > 1:
        return _launched_front_end(plan, stat_loggers, is_log_aggregated)
    prepare(preparation(plan.model, plan.parallel))
    # imports go on while the engine is built
    with ThreadPoolExecutor(1) as beside, quick_imports():
        # reading takes the interpreter's lock, which nobody needs while libraries are loaded
        tokenizer = beside.submit(read_tokenizer, plan.model)
        wait_for_torch()
        # imports torch, which a given front end does not need
        from quire.engine.client.inproc import build_client

        plan, options = with_stat_loggers(plan, stat_loggers, is_log_aggregated)
        client = build_client(plan)
        return build_front_end(plan, client, stats_options=options, tokenizer=tokenizer)
