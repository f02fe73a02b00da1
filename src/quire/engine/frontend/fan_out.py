"""Splits a request with `n` completions into n requests to the core."""

from __future__ import annotations

import copy

from quire.engine.frontend.input_processor import SEED_MASK
from quire.engine.wire.messages import EngineCoreRequest
from quire.params import SamplingParams


def fan_out(request: EngineCoreRequest, params: SamplingParams) -> list[EngineCoreRequest]:
    """Return the n core requests for `request`, with handles and seeds that count up from its own.
    Only the first computes prompt logprobs, which are the same for all.
    """
    first, others = _child_params(params), _child_params(params)
    if params.prompt_logprobs is not None:
        others.prompt_logprobs = None
        others.skip_reading_prefix_cache = False
    return [
        EngineCoreRequest(
            handle=request.handle + index,
            prompt_token_ids=request.prompt_token_ids,
            params=others if index else first,
            seed=(request.seed + index) & SEED_MASK,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            data_parallel_rank=request.data_parallel_rank,
            thinking=request.thinking,
            request_id=f"{index}_{request.request_id}",
            external_req_id=request.external_req_id,
            adapter=request.adapter,
        )
        for index in range(params.n)
    ]


def _child_params(params: SamplingParams) -> SamplingParams:
    child = copy.copy(params)
    child.n = 1
    return child
