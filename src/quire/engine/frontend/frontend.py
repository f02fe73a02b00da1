"""Step 2 of 8 on a request's path: the caller's side of an engine.

In: requests from llm_engine.py or async_llm.py. Out: core requests, one per completion, registered
for their outputs; on the way back, the output processor's `RequestOutput`s. Next:
input_processor.py, then a client (engine/client/).
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quire.config.histogram_buckets import sizes_up_to
from quire.config.plan import EnginePlan
from quire.config.plan_parts import ModelPlan
from quire.engine.client.client import CoreClient
from quire.engine.core.structured_outputs import grammar_trials
from quire.engine.frontend.custom_params import CustomParams
from quire.engine.frontend.fan_out import fan_out
from quire.engine.frontend.input_processor import (
    InputProcessor,
    ModelLimits,
    ReasoningMarks,
    checked_headers,
)
from quire.engine.frontend.output_processor import OutputProcessor, Processed
from quire.engine.frontend.output_stream import RequestOutputCollector
from quire.engine.frontend.pooling_input import PoolingFacts
from quire.engine.frontend.request_spans import begun_attributes
from quire.engine.frontend.request_state import RequestGroup
from quire.engine.frontend.taken_over import TakenOver
from quire.engine.outputs.experts import EXPERTS
from quire.engine.outputs.kinds import kinds_of
from quire.engine.stats.engine_stats import EngineStats, Stats
from quire.engine.stats.loggers import StatsOptions
from quire.engine.stats.operations import noted
from quire.engine.stats.step_stats import IterationStats
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.core_output import give_handles
from quire.engine.wire.messages import CLIENT_SHIFT, EngineCoreOutputs, EngineCoreRequest
from quire.errors import EngineError, InvalidParameter, NotBuiltYet
from quire.models import read_spec
from quire.observability.tracing import RequestTracer, exporter_to
from quire.params import PoolingParams, SamplingParams, checks
from quire.request_options import RequestOptions
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.frontend.embeds.prompts import EmbeddedPrompts
    from quire.engine.frontend.pictures.prompts_with_pictures import PromptsWithPictures

Client = TypeVar("Client", bound=CoreClient)

logger = logging.getLogger(__name__)

_FEW = 64
_LONGEST_S = 1e9
"""Longer time limits, up to an infinite one, are this one."""


class FrontEnd(Generic[Client]):
    """The caller's side of one engine: `LLMEngine` and `AsyncLLM` add requests to it, feed it the
    core's outputs and abort through it.

    `sampling_defaults` are the fields of SamplingParams that the model's files set; `model_name` is
    for metrics; `chat_template` overrides the tokenizer's. `plan` is the plan that the engine was
    built from, if any.
    """

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer | None,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        model_name: str,
        log_stats: bool = False,
        chat_template: str | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        client_index: int = 0,
        stats: Stats | None = None,
        plan: EnginePlan | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.client = client
        self.taken_over = TakenOver(client)
        self.tokenizer = tokenizer
        self.inputs = inputs
        self.outputs = outputs
        self.model_name = model_name
        self.log_stats = log_stats
        self.chat_template = chat_template
        self.sampling_defaults = dict(sampling_defaults or {})
        self.plan = plan
        self.tracer = tracer
        self._is_closed = False
        self._warnings: set[str] = set()
        self.stats: Stats = stats or EngineStats(model_name, sizes_up_to(inputs.limits.max_len))
        self._next_handle = client_index << CLIENT_SHIFT
        self._deadlines: list[tuple[float, str]] = []
        self.is_asleep = False
        """Whether this front end has put its engine to sleep and not woken it yet."""

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineError when the engine was made without one."""
        if self.tokenizer is None:
            raise EngineError("The engine was made with skip_tokenizer_init=True: no tokenizer.")
        return self.tokenizer

    def noted(self, call: Utility[Any]) -> AbstractContextManager[None]:
        """A context in which a call is made that statistics may count."""
        return noted(call, self.stats.note_operation)

    def note_call(self, call: Utility[Any], answer: object) -> None:
        """Follow a control call that succeeded: the sleep level is shown, and caches forgotten."""
        if call.method == "sleep":
            self.is_asleep = True
            self.stats.note_sleep(call.args[0])
        elif call.method == "release_kv_cache_memory":
            self.stats.note_sleep(0)
        elif call.method == "wake_up" and answer:
            self.is_asleep = False
            self.stats.note_sleep(None)
        elif call.method == "reset_mm_cache" and self.inputs.pictures is not None:
            self.inputs.pictures.forget()

    def add(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        options: RequestOptions,
        *,
        has_mailbox: bool = False,
    ) -> RequestGroup:
        """Check a request, register it for its outputs and send it. An `EngineCoreRequest` as
        prompt brings its own id, parameters and times. With tracing on, its span belongs to the
        trace of its headers. Raises subclasses of RequestError; then nothing has changed.
        """
        if isinstance(prompt, EngineCoreRequest):
            from quire.engine.frontend.prepared_request import parts_of  # few give one

            return self.add(*parts_of(prompt, options), has_mailbox=has_mailbox)
        _refuse_text(options.prompt_text)
        headers = checked_headers(options.trace_headers)
        limit_s = _timeout_s(options.timeout_s, params)
        names = self._new_names(request_id)
        request, text = self.inputs.process(prompt, params, options, **names)
        self._warn_of_priority(options)
        requests, own = [request], request.params
        if isinstance(own, SamplingParams) and own.n > 1:
            requests = fan_out(request, own)
        group = self._register(requests, request, text, options, has_mailbox)
        try:
            self._trace(group, headers, request)
            self._limit_time(group, limit_s)
            for one in requests:
                self.client.add_request(one)
            if request.media is not None and group.mailbox is not None:
                group.mailbox.survives = all(map(self.client.survives, group.handles))
        except BaseException:
            # of several completions some may be in the core already
            self.abort([group.internal_id], internal=True)
            raise
        return group

    def open(
        self,
        request_id: str,
        params: SamplingParams,
        options: RequestOptions,
    ) -> tuple[RequestGroup, EngineCoreRequest]:
        """Check and register a request whose prompt comes in parts, of which none is here yet; with
        a mailbox. The message, which lacks its prompt, goes with the first part to `begin`. Raises
        as `add`.
        """
        _refuse_text(options.prompt_text)
        limit_s = _timeout_s(options.timeout_s, params)
        headers = checked_headers(options.trace_headers)
        names = self._new_names(request_id)
        request = self.inputs.open(params, options, trace_headers=headers, **names)
        self._warn_of_priority(options)
        group = self._register([request], request, None, options, True)
        self._limit_time(group, limit_s)
        return group, request

    def begin(
        self,
        group: RequestGroup,
        opened: EngineCoreRequest,
        options: RequestOptions,
        prompt: Any,
        params: SamplingParams,
    ) -> None:
        """Send the first part of a prompt, in the message `opened`. Raises RequestErrors."""
        request, text = self.inputs.process(
            prompt,
            params,
            replace(options, arrival_time=opened.arrival_time),
            handle=opened.handle,
            request_id=opened.request_id,
            external_req_id=opened.external_req_id,
            seed=opened.seed,
        )
        # it may have been aborted before its first part came
        if not self.outputs.is_unfinished(group):
            return
        group.prompt, group.prompt_token_ids = text, request.prompt_token_ids
        group.set_output_kind(request.params.output_kind)
        self.outputs.begin(group, request, time.monotonic())
        self._trace(group, opened.trace_headers, request)
        self.client.add_request(request)

    def _new_names(self, request_id: str) -> dict[str, Any]:
        name, handle = checks.text("request_id", request_id), self._next_handle
        return {
            # callers may use one id for several requests at a time; the handle tells these apart
            "handle": handle, "request_id": f"{name}-{handle:08x}", "external_req_id": name,
        }  # fmt: skip

    def _register(
        self,
        requests: Sequence[EngineCoreRequest],
        request: EngineCoreRequest,
        text: str | None,
        options: RequestOptions,
        has_mailbox: bool,
    ) -> RequestGroup:
        assert request.external_req_id is not None, "the caller's id"
        group = RequestGroup(
            request_id=request.external_req_id,
            internal_id=request.request_id,
            prompt=text,
            prompt_token_ids=request.prompt_token_ids,
            output_kind=request.params.output_kind,
            handles=range(request.handle, request.handle + len(requests)),
            num_open=len(requests),
            lora_request=options.lora_request,
            kv_transfer_params=self._files_of(request),
        )
        if has_mailbox:
            group.mailbox = RequestOutputCollector(
                group.output_kind, group.internal_id, group.request_id
            )
        self._next_handle += len(requests)
        self.outputs.add(group, requests, time.monotonic())
        return group

    def _warn_of_priority(self, options: RequestOptions) -> None:
        if not options.priority or self.plan is None:
            return
        if self.plan.steps.scheduling_policy != "priority":
            self._warn_once(
                "Priorities of requests have no effect: set scheduling_policy=priority."
            )

    def _limit_time(self, group: RequestGroup, limit_s: float | None) -> None:
        if limit_s is not None:
            self._set_deadline(time.monotonic() + limit_s, group.internal_id)

    def _files_of(self, request: EngineCoreRequest) -> Mapping[str, str] | None:
        plan = None if self.plan is None else self.plan.sampling.hidden_states
        if plan is None:
            return None
        if request.resumable:
            hint = "Give it as a whole."
            raise NotBuiltYet("prompt", "in parts, whose hidden states are wanted", hint)
        return {"hidden_states_path": plan.path(request.handle, request.prompt_token_ids)}

    def _trace(
        self, group: RequestGroup, headers: Mapping[str, str] | None, request: EngineCoreRequest
    ) -> None:
        if self.tracer is not None:
            attributes = begun_attributes(group, request.params)
            group.span = self.tracer.begin(headers, request.arrival_time, attributes)
            if group.mailbox is not None:
                group.mailbox.traceparent = group.span.traceparent
        elif headers:
            self._warn_once(
                "Requests carry trace headers, but tracing is off: set otlp_traces_endpoint."
            )

    def _warn_once(self, text: str) -> None:
        # of what every request may bring: a line each would bury all other lines
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning(text)

    def extend(
        self,
        group: RequestGroup,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
    ) -> None:
        """Send the next input of a resumable request. Raises subclasses of RequestError."""
        request, _ = self.inputs.process(
            prompt,
            params,
            replace(options, arrival_time=None),
            handle=group.handles.start,
            continues=True,
            seed=0,  # that of the request stays
        )
        if self.outputs.is_unfinished(group):
            self.client.add_request(request)
            if self.log_stats:
                more = IterationStats(time.time(), num_prompt_tokens=len(request.prompt_token_ids))
                self.stats.record(None, more, self.client.engine_of(request.handle) or 0)

    def end_input(self, group: RequestGroup) -> None:
        """Close the input of a resumable request: it ends where it stops next."""
        if self.outputs.is_unfinished(group):
            self.client.add_request(EngineCoreRequest(group.handles.start, continues=True))

    def take_in(self, step: EngineCoreOutputs) -> Processed:
        """Turn a step of the core into outputs, and abort in the core what they end."""
        if self.taken_over.streams:
            step = self.taken_over.without(step)
        if step.names:  # a program made it
            give_handles(step, self.outputs.handle_of)
        processed = self.outputs.process(step)
        self._settle(processed, step)
        return processed

    def abort(
        self, ids: Iterable[str], *, internal: bool, stop_reason: str | None = None
    ) -> Processed:
        """Abort requests here and in the core, and return their last outputs."""
        processed = self.outputs.abort(ids, internal=internal, stop_reason=stop_reason)
        self._settle(processed)
        return processed

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Shut down the core through its client, and the helpers on this side. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.client.shutdown(timeout_s)
        self.inputs.close()
        if self.tracer is not None:
            self.tracer.close()

    @property
    def next_deadline(self) -> float | None:
        """The time of the next request deadline (monotonic, seconds)."""
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> Processed:
        """Abort requests past their deadline (stop reason "timeout"), return their last outputs."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            late.append(heapq.heappop(self._deadlines)[1])
        return self.abort(late, internal=True, stop_reason="timeout")

    def _set_deadline(self, when: float, internal_id: str) -> None:
        """Add a deadline; those of ended requests are removed once they are the majority."""
        heapq.heappush(self._deadlines, (when, internal_id))
        if len(self._deadlines) > 2 * self.outputs.num_unfinished + _FEW:
            live = set(self.outputs.unfinished_ids())
            self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
            heapq.heapify(self._deadlines)

    def _settle(self, processed: Processed, step: EngineCoreOutputs | None = None) -> None:
        if processed.stopped:
            self.client.abort_requests(processed.stopped)
        for engine_index, stats in processed.stats.items():
            self.stats.record(None if step is None else step.stats, stats, engine_index)


def _refuse_text(prompt_text: str | None) -> None:
    if prompt_text is not None:
        hint = "Else give {'prompt_token_ids': ..., 'prompt': ...} as the prompt."
        allowed = "it goes with an EngineCoreRequest"
        raise InvalidParameter("prompt_text", prompt_text, allowed, hint)


def _timeout_s(given: Any, params: object) -> float | None:
    """The time limit of a request in seconds, given or from its `extra_args`; None: no limit."""
    name = "timeout_s"
    if given is None and isinstance(params, SamplingParams):
        more = params.extra_args if isinstance(params.extra_args, dict) else {}
        name, given = "extra_args['timeout_s']", more.get("timeout_s")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise InvalidParameter(name, given, "it must be a number of seconds above 0")
    return float(min(given, _LONGEST_S))


def read_tokenizer(model: ModelPlan) -> Tokenizer | None:
    """The tokenizer of a plan, if it has one. Raises LoadError for files that cannot be used."""
    if model.tokenizer_files is None:
        return None
    folder, mode = model.tokenizer_files
    return Tokenizer.from_folder(folder, mode=mode)


def build_front_end(
    plan: EnginePlan,
    client: Client,
    client_index: int = 0,
    stats_options: StatsOptions | None = None,
    stats: Stats | None = None,
    tokenizer: Future[Tokenizer | None] | None = None,
) -> FrontEnd[Client]:
    """Load the plan's tokenizer, unless a thread does (`tokenizer`), and put it in front of
    `client`, which runs the plan's core.

    Each of several front ends of one engine has its own `client_index`, from 1 on, so that their
    requests draw different seeds. `stats` None: made from `stats_options`.

    Raises LoadError for tokenizer files that cannot be used.
    """
    loaded = read_tokenizer(plan.model) if tokenizer is None else tokenizer.result()
    kinds = kinds_of(
        plan.sampling, plan.speculation, has_connector=plan.memory.kv_connector is not None
    )
    limits = ModelLimits.of_plan(
        plan.model,
        plan.sampling,
        reports_experts=EXPERTS in kinds,
        pooling=_pooling_facts(plan.model),
        serves_adapters=plan.adapters is not None,
        has_connector=plan.memory.kv_connector is not None,
    )
    tracer = None
    if plan.serving.otlp_traces_endpoint is not None:
        tracer = RequestTracer(
            exporter_to(plan.serving.otlp_traces_endpoint), plan.model.served_model_names[0]
        )
    forms = grammar_trials(plan.model, plan.sampling)
    if forms is not None:
        forms.prepare()
    stats = stats or EngineStats.of_plan(plan, client.engine_indices, stats_options)
    processors = plan.sampling.logits_processors
    inputs = InputProcessor(
        loaded,
        limits,
        seed=_seed_of(plan, client_index),
        forms=forms,
        custom=CustomParams(processors) if processors else None,
        pictures=_pictures_of(plan, loaded),
        embeds=_embeds_of(plan),
    )
    if inputs.pictures is not None:
        stats.media_counts = inputs.pictures.cache_counts
    if plan.sampling.reasoning_marks:
        start, end = plan.sampling.reasoning_marks
        inputs.generation.reasoning_marks = ReasoningMarks(start, end)
    return FrontEnd(
        client=client,
        tokenizer=loaded,
        inputs=inputs,
        outputs=OutputProcessor(
            loaded,
            stream_interval=plan.serving.stream_interval,
            log_stats=plan.serving.log_stats or tracer is not None,  # spans carry the same times
            kinds=kinds,
        ),
        model_name=plan.model.served_model_names[0],
        log_stats=plan.serving.log_stats,
        chat_template=plan.model.chat_template,
        sampling_defaults=plan.sampling.sampling_defaults,
        client_index=client_index,
        stats=stats,
        plan=plan,
        tracer=tracer,
    )


def _pictures_of(plan: EnginePlan, tokenizer: Tokenizer | None) -> PromptsWithPictures | None:
    if tokenizer is None or plan.media is None:
        return None
    from quire.engine.frontend.pictures.picture_settings import (
        picture_prompts,  # few models take pictures
    )

    return picture_prompts(plan.model, plan.media, tokenizer)


def _embeds_of(plan: EnginePlan) -> EmbeddedPrompts | None:
    if not plan.model.takes_prompt_embeds:
        return None
    from quire.engine.frontend.embeds.prompts import EmbeddedPrompts  # few engines take some

    return EmbeddedPrompts(read_spec(plan.model.hf_config, plan.model.pooler).table_width)


def _pooling_facts(model: ModelPlan) -> PoolingFacts | None:
    if model.pooler is None:
        return None
    name = model.served_model_names[0]
    return PoolingFacts(model.pooler, model.embedding_size, name, model.lowers_input)


def _seed_of(plan: EnginePlan, client_index: int) -> int:
    if not client_index:
        return plan.model.seed
    name = f"{plan.model.seed}/{client_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
