"""Splits a request with `n` completions into n requests to the core."""

from __future__ import annotations

import copy

import msgspec

from quire.engine.frontend.input_processor import SEED_MASK
from quire.engine.wire.messages import EngineCoreRequest
from quire.params import SamplingParams


def fan_out(request: EngineCoreRequest, params: SamplingParams) -> list[EngineCoreRequest]:
    """Return the n core requests for `request`, with handles and seeds that count up from its own.
    Only the first computes prompt logprobs, which are the same for all.
    """
    first, others = _child_params(params), _child_params(params)
    if params.scores_prompt:
        others.prompt_logprobs = others.prompt_logprob_token_ids = None
        others.prompt_logprob_start = None
        # it was set for the scores: without them the others may read the blocks of the first
        others.skip_reading_prefix_cache = False
    return [
        msgspec.structs.replace(
            request,
            handle=request.handle + index,
            params=others if index else first,
            seed=(request.seed + index) & SEED_MASK,
            request_id=f"{index}_{request.request_id}",
        )
        for index in range(params.n)
    ]


def _child_params(params: SamplingParams) -> SamplingParams:
    child = copy.copy(params)
    child.n = 1
    return child
