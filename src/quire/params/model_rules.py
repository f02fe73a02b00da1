"""What `SamplingParams` may ask of one model, given its vocabulary and the engine's limits."""

from __future__ import annotations

from quire.errors import InvalidParameter
from quire.params import checks
from quire.params.sampling_fields import SamplingFields


def verify(params: SamplingFields, *, vocab_size: int, max_logprobs: int) -> None:
    """Raise InvalidParameter for the first field that cannot be honoured; -1 logprobs means any."""
    limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    _verify_logprobs(params, vocab_size, limit)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        ids = getattr(params, name)
        if ids:
            checks.in_vocabulary(name, ids, vocab_size)
    _verify_prompt_logprob_ids(params, vocab_size, limit)
    _verify_trace(params, vocab_size)


def _verify_logprobs(params: SamplingFields, vocab_size: int, limit: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and (vocab_size if value == -1 else value) > limit:
            allowed = f"at most {limit} can be asked for"
            hint = "Raise the engine's max_logprobs." if limit < vocab_size else ""
            raise InvalidParameter(name, value, allowed, hint)
    listed = params.logprob_token_ids
    if listed is not None and params.logprobs not in (None, len(listed)):
        allowed = f"beside logprob_token_ids it must be None or their number, {len(listed)}"
        raise InvalidParameter("logprobs", params.logprobs, allowed)


def _verify_prompt_logprob_ids(params: SamplingFields, vocab_size: int, limit: int) -> None:
    name = "prompt_logprob_token_ids"
    if params.prompt_logprob_token_ids is None:
        return
    for row in checks.sequence(name, params.prompt_logprob_token_ids, "a list of lists", 2**20):
        for token_id in checks.integers(name, row, limit):
            if not -1 <= token_id < vocab_size:
                allowed = f"each must be a token id from 0 to {vocab_size - 1}, or -1"
                raise InvalidParameter(name, token_id, allowed)


def _verify_trace(params: SamplingFields, vocab_size: int) -> None:
    trace = params.trace_decode_token_ids
    if trace is None:
        return
    checks.in_vocabulary("trace_decode_token_ids", trace, vocab_size)
    excluded = {
        "n": params.n > 1,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "structured_outputs": params.structured_outputs is not None,
        "repetition_detection": params.repetition_detection is not None,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "bad_words": bool(params.bad_words),
    }
    for name, is_set in excluded.items():
        if is_set:
            allowed = f"it cannot be used together with {name}"
            raise InvalidParameter("trace_decode_token_ids", trace, allowed)
