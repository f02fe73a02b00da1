"""Requests that a program has processed before it adds them: `InputProcessor.process_inputs` makes
such an `EngineCoreRequest`, and the engine takes one in place of a prompt.
"""

from __future__ import annotations

from dataclasses import replace

from quire.engine.wire.messages import AdapterRef, EngineCoreRequest
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet
from quire.params import RequestParams
from quire.prompts import TokensPrompt
from quire.request_options import RequestOptions


def parts_of(
    request: EngineCoreRequest, options: RequestOptions
) -> tuple[str, TokensPrompt, RequestParams, RequestOptions]:
    """The arguments of `FrontEnd.add` that a request which was processed before stands for; they
    rule over those that come with it. Raises InvalidParameter for one that has an external id,
    NotBuiltYet for a resumable one and one with media.
    """
    if not isinstance(request.adapter, AdapterRef | None):
        raise InvalidType("adapter", request.adapter, "it must be an AdapterRef or None")
    if request.external_req_id is not None:
        allowed = "the engine sets it, from request_id"
        raise InvalidParameter("external_req_id", request.external_req_id, allowed)
    if request.resumable:
        hint = "Give an AsyncLLM an async generator of StreamingInput."
        raise NotBuiltYet("resumable", True, hint)
    if request.media is not None:
        raise NotBuiltYet("media", "media of a prompt", "Give text alone.")
    prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids, cache_salt=request.cache_salt)
    text = request.prompt_text if options.prompt_text is None else options.prompt_text
    if text is not None:
        prompt["prompt"] = text
    own = replace(
        options,
        arrival_time=request.arrival_time or None,
        lora_request=request.lora_request,
        priority=request.priority,
        data_parallel_rank=request.data_parallel_rank,
        trace_headers=request.trace_headers,
        prompt_text=None,
    )
    return request.request_id, prompt, request.params, own
