"""The attributes of a request's span, under the names that dashboards of this field use."""

from __future__ import annotations

from quire.engine.frontend.request_state import RequestGroup
from quire.engine.stats.step_stats import FinishedRequestStats
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.observability.tracing import RequestSpan
from quire.outputs import RequestStateStats
from quire.params import RequestParams, SamplingParams


def begun_attributes(group: RequestGroup, params: RequestParams) -> dict[str, object]:
    """The attributes known when a request arrives; None: not set by the request."""
    attributes: dict[str, object] = {
        "gen_ai.request.id": group.request_id,
        "gen_ai.usage.prompt_tokens": len(group.prompt_token_ids),
    }
    if isinstance(params, SamplingParams):
        attributes |= {
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
    return attributes


def end_span(
    group: RequestGroup,
    span: RequestSpan,
    end: Finished,
    ended: FinishedRequestStats,
    times: RequestStateStats,
) -> None:
    """End the span with the request's last completion, whose times it reports."""
    attributes = {
        "gen_ai.usage.completion_tokens": group.num_generated,
        "gen_ai.response.finish_reasons": [str(end.reason)],
        "gen_ai.latency.time_to_first_token": times.first_token_latency,
        "gen_ai.latency.e2e": ended.e2e_latency,
        "gen_ai.latency.time_in_queue": ended.queued_time,
        "gen_ai.latency.time_in_model_prefill": ended.prefill_time,
        "gen_ai.latency.time_in_model_decode": ended.decode_time,
        "gen_ai.latency.time_in_model_inference": ended.inference_time,
    }
    is_failure = end.reason is FinishReason.ERROR
    span.end(attributes, (end.message or "the request failed") if is_failure else None)
    group.span = None
