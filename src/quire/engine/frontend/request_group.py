"""A request with `n` completions is n requests to the core; here they are made, and their outputs
joined again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from quire.engine.frontend.output_stream import RequestOutputCollector
from quire.engine.wire.messages import EngineCoreRequest
from quire.observability.tracing import RequestSpan
from quire.outputs import CompletionOutput, RequestOutput, RequestStateStats
from quire.params import PoolingParams, RequestOutputKind, SamplingParams

SEED_MASK = 2**64 - 1


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The n requests that `request` stands for, with handles and seeds counting up from its own.

    Only the first computes prompt logprobs, which are the same for all. A pooling request stands
    for itself.
    """
    params = request.params
    if isinstance(params, PoolingParams) or params.n == 1:
        return [request]
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
            client_index=request.client_index,
            thinking=request.thinking,
        )
        for index in range(params.n)
    ]


def _child_params(params: SamplingParams) -> SamplingParams:
    child = copy.copy(params)
    child.n = 1
    return child


@dataclass(slots=True, eq=False)
class RequestGroup:
    """What the completions of one request have in common, and what is still to come of them.

    `request_id` is the caller's, `internal_id` ours. `num_open` completions have not ended; in
    FINAL_ONLY the ended ones wait in `ended` for the others.
    """

    request_id: str
    internal_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    output_kind: RequestOutputKind
    handles: range
    num_open: int
    num_cached_tokens: int | None = None
    is_queued: bool = True
    """No output has come yet."""
    num_longest: int = 0
    """Tokens of the longest completion that has ended."""
    num_generated: int = 0
    """Tokens of all completions that have ended."""
    span: RequestSpan | None = None
    """Its span in a trace, if there are traces."""
    prompt_logprobs: object = None
    mailbox: RequestOutputCollector | None = None
    """Where the outputs go; None: to whoever steps the engine."""
    ended: list[CompletionOutput] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return self.num_open == 0

    def output(
        self, completion: CompletionOutput, metrics: RequestStateStats | None
    ) -> RequestOutput | None:
        """What the caller gets now that there is `completion`; None while FINAL_ONLY waits for the
        other ones.
        """
        outputs = [completion]
        if self.output_kind is RequestOutputKind.FINAL_ONLY and len(self.handles) > 1:
            self.ended.append(completion)
            if self.num_open:
                return None
            outputs = sorted(self.ended, key=lambda ended: ended.index)
        prompt_logprobs = self.prompt_logprobs
        if self.output_kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            prompt_logprobs,
            outputs,
            self.num_open == 0,
            metrics,
            num_cached_tokens=self.num_cached_tokens,
        )
