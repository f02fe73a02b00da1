"""`AsyncLLM`: one engine for many concurrent callers in one event loop.

It differs from `LLMEngine` only in how callers wait: a task receives the core's outputs and puts
them into each request's mailbox (output_stream.py), from which `generate` yields them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar, cast

from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.config.args.engine_args import EngineArgs
from quire.config.plan import EnginePlan
from quire.engine.arguments import (
    check_clients,
    check_executor_class,
    refuse_given,
    refuse_keywords,
    request_ids,
    require_plan,
)
from quire.engine.client.client import AsyncEngineCoreClient
from quire.engine.client.handed_over import HandedOver
from quire.engine.control_verbs import AwaitedControl
from quire.engine.event_loop import Alarm, while_alive
from quire.engine.frontend.admission import Admission, QueueLimits
from quire.engine.frontend.engine_attributes import EngineAttributes
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.input_feeders import InputFeeders
from quire.engine.frontend.output_stream import RequestOutputCollector
from quire.engine.frontend.streaming_input import InputStream
from quire.engine.frontend.taken_over import Deliver
from quire.engine.launcher import launch_async_front_end
from quire.engine.shared_cores.load_board import Neighbours
from quire.engine.stats.engine_stats import PREFIX
from quire.engine.stats.loggers import StatLoggerFactory, with_log_stats
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.environment import read_environment
from quire.errors import (
    CapacityError,
    EngineDeadError,
    EngineError,
    EngineGenerateError,
    InputStreamError,
    InvalidType,
    RequestError,
)
from quire.lora.request import LoRARequest
from quire.observability.prometheus import MetricsCollector
from quire.observability.watchdog import LoopWatch, Watchdog
from quire.outputs import RequestOutput
from quire.params import PoolingParams, SamplingParams, checks
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.request_options import RequestOptions

T = TypeVar("T")

logger = logging.getLogger(__name__)

PROGRESS_S = 60.0
"""A core that has work and completes no step in this time is not ready."""
ALIVE_S = 10.0
"""A core whose loop has not reported for this long is not alive."""
STALL_S = 10.0
"""An event loop that is blocked for this long is logged with the stacks of all threads."""
_START_POLL_S = 0.1
"""Interval of looking for a core that has started, in seconds. Requests need no such look."""
SLICE_ROWS = 256
"""The output handler yields to consumers after this many rows: about a millisecond of work."""


class AsyncLLM(EngineAttributes, AwaitedControl):
    """Serves requests concurrently; every method belongs to one event loop.

    Steps run in processes of their own. `sleep`, `pause_generation` and the like are verbs
    (control_verbs.py). `stat_loggers` record every step (engine/stats/loggers.py). `front_end`, if
    given, is used instead of starting one from `vllm_config`. `log_stats` rules over the plan's.
    `executor_class` is the plan's own or None; `usage_context` is for reports of usage, which are
    never sent; an engine has one client, this one. `limits` bound the queue (None: the
    plan's) over this front end and its `neighbours`, the other front ends of the same engine.
    Invariant: every request ends with one last output or one exception.
    """

    front_end: FrontEnd[AsyncEngineCoreClient]

    def __init__(
        self,
        vllm_config: EnginePlan | None = None,
        executor_class: Any = None,
        log_stats: bool | None = None,
        usage_context: Any = None,
        mm_registry: Any = None,
        use_cached_outputs: bool = False,
        log_requests: bool = True,
        start_engine_loop: bool = True,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        aggregate_engine_logging: bool = False,
        client_addresses: Any = None,
        client_count: int = 1,
        client_index: int = 0,
        *,
        front_end: FrontEnd[AsyncEngineCoreClient] | None = None,
        limits: QueueLimits | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        refuse_given(mm_registry=mm_registry, use_cached_outputs=use_cached_outputs)
        check_clients(client_addresses, client_count, client_index)
        check_executor_class(executor_class, vllm_config)
        if front_end is None:
            plan = with_log_stats(require_plan(vllm_config), log_stats)
            front_end = launch_async_front_end(plan, stat_loggers, aggregate_engine_logging)
            log_stats = None
        self.front_end = front_end
        self._is_logging = front_end.log_stats if log_stats is None else log_stats
        self._log_requests = log_requests
        limits = limits or _limits(vllm_config or front_end.plan)
        self._admission = Admission(front_end.outputs, limits, neighbours=neighbours)
        # a counter that exists at zero shows its first increment, too
        front_end.stats.note_rejected(self._admission.num_rejected)
        self._handler: asyncio.Task[None] | None = None
        self._feeders = InputFeeders(front_end, while_alive(self._end))
        self._next_deadline = Alarm(while_alive(self._expire))
        self._next_log = Alarm(while_alive(self._log_again))
        self._loop_watch = LoopWatch(Watchdog("The event loop of the front end", STALL_S))
        self._log_interval_s = read_environment().log_stats_interval_s
        self._idle: list[asyncio.Future[None]] = []
        self._error: BaseException | None = None
        self.refuses: str | None = None
        """The reason not to accept any more requests; None: they are accepted."""
        self._dead = asyncio.Event()
        if start_engine_loop:
            self._start_handler()

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EnginePlan,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: Any = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> Self:
        """Start a plan's cores; returns when they serve. `disable_log_stats` beats the plan's."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            usage_context=usage_context,
            log_requests=enable_log_requests,
            start_engine_loop=start_engine_loop,
            stat_loggers=stat_loggers,
            aggregate_engine_logging=aggregate_engine_logging,
            client_addresses=client_addresses,
            client_count=client_count,
            client_index=client_index,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
    ) -> Self:
        """Make an engine from its arguments. Raises RequestError for an invalid argument, LoadError
        for a model that cannot be loaded, EngineDeadError for a core that does not start.
        """
        is_logging = isinstance(engine_args, AsyncEngineArgs) and engine_args.enable_log_requests
        return cls(
            usage_context=usage_context,
            log_requests=is_logging,
            start_engine_loop=start_engine_loop,
            front_end=launch_async_front_end(engine_args, stat_loggers),
        )

    # requests

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        timeout_s: float | None = None,
        **unbuilt: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt and yield its outputs (cumulative, delta or final) as they arrive.
        Closing the generator, or cancelling its task, aborts the request.

        `prompt` may be an async generator of `StreamingInput`, or an `EngineCoreRequest` of
        `input_processor.process_inputs`, which `prompt_text` may go with. After `timeout_s` seconds
        (None: `extra_args["timeout_s"]`, else never) the request ends with what it has so far.
        Raises subclasses of RequestError, CapacityError when the queue is full, EngineDeadError,
        and EngineGenerateError for anything else.
        """
        _refuse_kind(PoolingParams, "sampling_params", sampling_params, prompt)
        async with self._mailbox(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            prompt_text=prompt_text,
            timeout_s=timeout_s,
            **unbuilt,
        ) as mailbox:
            is_finished = False
            while not is_finished:
                output = mailbox.get_nowait() or await mailbox.get()
                is_finished = output.finished
                yield output

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        prompt_text: str | None = None,
        timeout_s: float | None = None,
        **unbuilt: Any,
    ) -> RequestOutputCollector:
        """Queue a request and return the mailbox of its outputs. To stop early call `abort` rather
        than closing the mailbox. Raises what `generate` raises; what the generator of a streamed
        prompt raises, and errors in its parts, come from the mailbox as InputStreamError.
        """
        if unbuilt:
            refuse_keywords(unbuilt)
        self._require_alive()
        self._start_handler()
        # before anything is done for the request, so that a refusal costs microseconds
        self.check_admission(params.n if isinstance(params, SamplingParams) else 1)
        options = RequestOptions(
            arrival_time=arrival_time,
            priority=priority,
            lora_request=lora_request,
            data_parallel_rank=data_parallel_rank,
            trace_headers=trace_headers,
            tokenization_kwargs=tokenization_kwargs,
            prompt_text=prompt_text,
            timeout_s=timeout_s,
        )
        if inspect.isasyncgen(prompt):
            stream = cast(InputStream, prompt)
            group = self._feeders.add(request_id, stream, params, options)
        else:
            if (trial := self.front_end.inputs.prepare(params)) is not None:
                await asyncio.wrap_future(trial)
            prompt = await self.front_end.inputs.loaded(prompt)
            group = self.front_end.add(request_id, prompt, params, options, has_mailbox=True)
        assert group.mailbox is not None
        try:
            if self._log_requests:
                logger.info("Added request %s.", request_id)
            self._admission.share_load()
            self._arm()
        except BaseException:
            self._leave(group.mailbox)
            raise
        return group.mailbox

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        data_parallel_rank: int | None = None,
        timeout_s: float | None = None,
        **unbuilt: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool a prompt and yield the one output, whose `data` is an array of numpy. Closing the
        generator, or cancelling its task, aborts the request.

        A task that is None in `pooling_params` is one of tokens: see `PoolingParams`. Raises what
        `generate` raises.
        """
        _refuse_kind(SamplingParams, "pooling_params", pooling_params, prompt)
        async with self._mailbox(
            request_id,
            prompt,
            pooling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
            timeout_s=timeout_s,
            **unbuilt,
        ) as mailbox:
            yield await mailbox.get_pooled()

    @asynccontextmanager
    async def _mailbox(
        self, request_id: str, *inputs: Any, **options: Any
    ) -> AsyncIterator[RequestOutputCollector]:
        """The mailbox of a request, which is aborted where its reader leaves before the end;
        errors as the reader gets them. The arguments are those of `add_request`.
        """
        mailbox = None
        try:
            mailbox = await self.add_request(request_id, *inputs, **options)
            yield mailbox
        except (EngineDeadError, RequestError, CapacityError) as error:
            if self._log_requests:
                logger.info("Request %s failed: %s", request_id, error)
            raise
        except InputStreamError as error:
            # the fault of the caller's own stream
            raise error.cause from None
        except Exception as error:
            logger.exception("Request %s failed in the front end.", request_id)
            raise EngineGenerateError(f"The stream ended by an error: {error}") from error
        finally:
            if mailbox is not None:
                self._leave(mailbox)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests by the callers' ids (every request that has one of them), or by the
        engine's own if `internal`; unknown ids are ignored. Their readers get a last output with
        the finish reason "abort".
        """
        ids = [request_id] if isinstance(request_id, str) else request_ids(request_id)
        processed = self.front_end.abort(ids, internal=checks.flag("internal", internal))
        if self._log_requests and processed.ended:
            logger.info("Aborted request(s) %s.", ", ".join(ids))
        self._note_ended(len(processed.ended))

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise QueueOverflowError or MaxQueuedTokensError if a request with `n` completions
        exceeds the limits now; the error's `retry_after_s` is when to try again.
        """
        count = checks.integer("n", n, 0, checks.MAX_INT, "it must be an int of at least 0")
        if self.refuses is not None:
            raise CapacityError(self.refuses)
        try:
            # those of other servers' clients have no state here, which would count them
            self._admission.check(count + len(self.front_end.taken_over.streams))
        except CapacityError:
            self.front_end.stats.note_rejected(self._admission.num_rejected)
            raise

    def get_num_queued_tokens(self) -> int:
        """Prompt tokens of requests that have no output yet."""
        return self.front_end.outputs.num_queued_tokens

    def _leave(self, mailbox: RequestOutputCollector) -> None:
        """Abort the request, unless it has ended: its reader is gone."""
        mailbox.close()
        self._end(mailbox, "its reader is gone")

    def _end(self, mailbox: RequestOutputCollector, why: str) -> None:
        if self._error is None:
            processed = self.front_end.abort([mailbox.request_id], internal=True)
            if self._log_requests and processed.ended:
                logger.info("Request %s was aborted: %s.", mailbox.external_req_id, why)
            self._note_ended(len(processed.ended))

    # streams of and for other servers

    @property
    def handed_over(self) -> HandedOver | None:
        """The streams that another server goes on with; None where they cannot be handed over."""
        return getattr(self.front_end.client, "handed_over", None)

    def take_over(self, message: EngineCoreRequest, deliver: Deliver) -> int:
        """Go on with a stream of another server, whose outputs are delivered; returns its handle
        for `leave`. Raises what `add_request` does, and InvalidType.
        """
        if not isinstance(message, EngineCoreRequest):
            raise InvalidType("message", message, "it must be an EngineCoreRequest")
        if not callable(deliver):
            raise InvalidType("deliver", deliver, "it must be a function of the outputs")
        self._require_alive()
        self._start_handler()
        self.check_admission()
        return self.front_end.taken_over.begin(message, deliver)

    def leave(self, handle: int) -> None:
        """End a stream of another server, if it has not ended. Raises InvalidType."""
        handle = checks.integer("handle", handle, 0, sys.maxsize, "it must be a handle")
        if self._error is None:
            self.front_end.taken_over.end(handle)

    # outputs

    def _start_handler(self) -> None:
        if self._handler is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # no loop yet: the first request starts it
        handling = _handle_outputs(weakref.ref(self), self.front_end.client, self._loop_watch)
        self._handler = loop.create_task(handling, name="output handler")
        self._loop_watch.start()
        self._arm_log()

    def _take_in(self, step: EngineCoreOutputs) -> None:
        self._note_ended(len(self.front_end.take_in(step).ended))

    def _die(self, error: BaseException) -> None:
        if not isinstance(error, EngineDeadError):
            logger.error("The output handler failed.", exc_info=error)
            dead = EngineDeadError(f"The output handler failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            error = dead
        self._error = error
        self._dead.set()
        self.front_end.outputs.fail_all(error)
        self.front_end.taken_over.fail_all()
        self._note_ended(0)

    def _note_ended(self, num_completions: int) -> None:
        if num_completions:
            self._admission.note_ended(num_completions)
            if self._feeders.running:
                self._feeders.end_unread()
        if self._idle and not self.front_end.outputs.num_unfinished:
            waiting, self._idle = self._idle, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def _arm(self) -> None:
        if (deadline := self.front_end.next_deadline) is not None:
            self._next_deadline.set(deadline)

    def _expire(self) -> None:
        if self._error is None:
            self._note_ended(len(self.front_end.expire(time.monotonic()).ended))
            self._arm()

    # the engine as a whole

    async def is_tracing_enabled(self) -> bool:
        """Whether requests are traced (otlp_traces_endpoint)."""
        return self.front_end.tracer is not None

    async def check_health(self) -> None:
        """Raise EngineDeadError unless requests can be served."""
        self._require_alive()

    def is_alive(self, limit_s: float = ALIVE_S) -> bool:
        """Whether every core's loop has run within the last `limit_s` seconds."""
        return not self.errored and all(core.is_alive(limit_s) for core in self._cores())

    def is_ready(self, limit_s: float = PROGRESS_S) -> bool:
        """Whether every core with work completed a step within the last `limit_s` seconds."""
        return not self.errored and all(core.is_ready(limit_s) for core in self._cores())

    @property
    def is_loading(self) -> bool:
        """Whether a core has not been ready so far. Requests wait for it."""
        return not self.errored and any(core.is_loading for core in self._cores())

    async def wait_until_started(self) -> None:
        """Return when every core has been ready. Raises what kept one from it."""
        self._start_handler()
        while self.is_loading:
            await asyncio.sleep(_START_POLL_S)
        if self.errored:
            raise self.dead_error.__cause__ or self.dead_error

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait for all requests. Raises TimeoutError after `drain_timeout` seconds."""
        limit_s = _seconds("drain_timeout", drain_timeout)
        if self.front_end.outputs.num_unfinished:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            try:
                await asyncio.wait_for(idle, limit_s)
            except TimeoutError:
                left = self.front_end.outputs.num_unfinished
                text = f"{left} requests were not finished after {drain_timeout:g} s."
                raise TimeoutError(text) from None

    async def scale_elastic_ep(
        self, new_data_parallel_size: int, drain_timeout: float = 300
    ) -> None:
        """Add or remove data-parallel cores while requests run, until there are
        `new_data_parallel_size`; no request is lost.

        New cores get requests once they are ready. Cores to be removed finish their requests first.
        Raises TimeoutError, and keeps all cores, if they do not within `drain_timeout` seconds;
        EngineError while the engine is paused or asleep, because a new core would be neither.
        """
        name, allowed = "new_data_parallel_size", "it must be an int of at least 1"
        size = checks.integer(name, new_data_parallel_size, 1, checks.MAX_INT, allowed)
        limit_s = _seconds("drain_timeout", drain_timeout)
        if await self.is_paused() or await self.is_sleeping():
            raise EngineError("The engine is paused: resume_generation() or wake_up() first.")
        await self.front_end.client.scale(size, limit_s)
        self._note_cores()

    async def is_scaling_elastic_ep(self) -> bool:
        """Whether the number of cores is changing now. Requests run meanwhile."""
        return await self.front_end.client.is_scaling()

    async def refresh_metrics(self) -> None:
        """Fetch the current metrics for `get_metrics` and `metrics_collector`. Without this call,
        one of several front ends shows the values that it fetched last.
        """
        await self.front_end.stats.refresh()

    def metrics_collector(self, prefix: str = PREFIX) -> MetricsCollector:
        """The metrics as a collector for a registry of `prometheus_client`, as shown by a server's
        `/metrics`. With statistics off the totals do not change.
        """
        return self.front_end.stats.collector(prefix)

    def _log_again(self) -> None:
        if self._error is None:
            self.front_end.stats.log()
            self._arm_log()

    def _arm_log(self) -> None:
        if self._is_logging and self._error is None:
            self._next_log.set(time.monotonic() + self._log_interval_s)

    async def do_log_stats(self) -> None:
        """Log one line of throughput and load, if statistics are on."""
        if self._is_logging:
            self.front_end.stats.log()

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut the engine down: requests may still finish for `timeout` seconds, then all streams
        end with EngineDeadError. May be called again.

        This blocks: in the engine's own event loop outputs are processed here, and read by the
        streams when the loop runs again.
        """
        deadline = time.monotonic() + (0.0 if timeout is None else _seconds("timeout", timeout))
        if self._error is None:
            # the event loop stands still meanwhile, so outputs are taken here
            self._drain(deadline)
        if self._handler is not None:
            self._handler.cancel()
        self._feeders.cancel()
        self._loop_watch.close()
        self._next_deadline.cancel()
        self._next_log.cancel()
        if self._error is None:
            self._die(EngineDeadError("The engine was shut down; make a new one."))
        self.front_end.shutdown(max(0.0, deadline - time.monotonic()))

    def __del__(self) -> None:
        """End the cores, and the task that waits for their outputs."""
        super().__del__()
        handler = vars(self).get("_handler")
        if handler is not None and not handler.done() and not handler.get_loop().is_closed():
            # garbage is collected in any thread
            handler.get_loop().call_soon_threadsafe(handler.cancel)

    def _drain(self, deadline: float) -> None:
        client, outputs = self.front_end.client, self.front_end.outputs
        try:
            while outputs.num_unfinished and (left_s := deadline - time.monotonic()) > 0:
                step = client.wait_output(left_s)
                if step is not None:
                    self._note_ended(len(self.front_end.take_in(step).ended))
        except Exception as error:
            self._die(error)

    @property
    def is_running(self) -> bool:
        """Whether the output handler runs, or will start with the first request."""
        return self._error is None and (self._handler is None or not self._handler.done())

    @property
    def is_stopped(self) -> bool:
        """Whether the engine is dead."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine is dead: its core died for good, or it was shut down."""
        return not self.is_running

    async def wait_until_dead(self) -> None:
        """Return when the engine is dead."""
        await self._dead.wait()

    @property
    def dead_error(self) -> BaseException:
        """The reason why the engine is dead."""
        return self._error or EngineDeadError("The output handler has ended.")

    def _cores(self) -> list[Any]:
        client = self.front_end.client
        return [client.core_status(index) for index in client.engine_indices]

    async def _call(self, call: Utility[T]) -> T:
        self._require_alive()
        self._start_handler()
        with self.front_end.noted(call):
            answer = await self.front_end.client.call(call)
        self.front_end.note_call(call, answer)
        return answer

    def _require_alive(self) -> None:
        if self.errored:
            raise EngineDeadError(str(self.dead_error)) from self.dead_error


AsyncLLMEngine = AsyncLLM
"""`AsyncLLM` by an older name."""


def _seconds(name: str, given: object) -> float:
    allowed = "it must be a number of seconds of at least 0"
    return checks.number(name, given, 0, float("inf"), allowed)


def _limits(plan: EnginePlan | None) -> QueueLimits:
    assert plan is not None, "an engine without a plan needs explicit limits"
    return QueueLimits(plan.serving.max_num_queued_reqs, plan.serving.max_num_queued_tokens)


def _refuse_kind(kind: type, name: str, params: object, prompt: object) -> None:
    """Raise InvalidType for parameters whose output the caller would wait for in vain."""
    given = prompt.params if isinstance(prompt, EngineCoreRequest) else params
    if isinstance(given, kind):
        allowed = "generate() takes SamplingParams, and encode() PoolingParams"
        raise InvalidType(name, given, allowed)


async def _handle_outputs(
    engine: weakref.ref[AsyncLLM], client: AsyncEngineCoreClient, watch: LoopWatch
) -> None:
    """Process the core's steps until it dies or the engine is shut down. The event loop holds this
    task, which holds the engine only while it processes a step: one that nothing else refers to is
    collected, and its core ends with it.

    Steps that have already arrived are processed together, up to SLICE_ROWS rows, and a consumer
    gets one output for all of them: under load the cost is per output, not per token.
    """
    num_rows = 0
    try:
        while True:
            step = await client.get_output()
            if (own := engine()) is None:
                return
            own._take_in(step)
            # nothing here keeps the engine alive while the next step is awaited
            del own
            num_rows += len(step.handles) + len(step.parts)
            if num_rows >= SLICE_ROWS:
                num_rows = 0
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if (own := engine()) is not None:
            own._die(error)
        if not isinstance(error, Exception):
            raise
    finally:
        if engine() is None:
            watch.close()
