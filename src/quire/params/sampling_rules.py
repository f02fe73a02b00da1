"""Checks `SamplingParams` by itself (`check`), and for a model and its limits (`verify`)."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any

from quire.environment import max_sequences
from quire.errors import InvalidParameter, InvalidType
from quire.params import checks
from quire.params.checks import MAX_INT
from quire.params.kinds import RequestOutputKind
from quire.params.sampling_fields import SamplingFields
from quire.params.structured import RepetitionDetectionParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 256
MAX_STOP_CHARS = 16384
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_CHARS = 16384
"""Bounds on the fields that multiply work, so that no request can slow the others down."""
MAX_BIASES = 2**14
MAX_LIST = 2**20
"""Lists of token ids are bounded by the vocabulary; this bounds the work of finding that out."""
MAX_SCORED = 2**20

LOWEST_TEMPERATURE = 0.01
MAX_BIAS = 1e30
"""Largest bias: beyond it, dividing by the temperature could leave float32."""


def check(params: SamplingFields) -> None:
    """Normalize every field, or raise for the first that is not allowed."""
    _check_flags(params)
    _check_counts(params)
    _check_penalties(params)
    _check_distribution(params)
    _check_stops(params)
    _check_logprobs(params)
    _check_token_lists(params)
    _check_parts(params)


def _check_flags(params: SamplingFields) -> None:
    checks.flag("ignore_eos", params.ignore_eos)
    checks.flag("flat_logprobs", params.flat_logprobs)
    checks.flag("detokenize", params.detokenize)
    checks.flag("skip_special_tokens", params.skip_special_tokens)
    checks.flag("spaces_between_special_tokens", params.spaces_between_special_tokens)
    checks.flag("include_stop_str_in_output", params.include_stop_str_in_output)
    checks.flag("skip_clone", params.skip_clone)


def _check_counts(params: SamplingFields) -> None:
    # the usual value needs no look at the environment, which has the bound
    if params.n.__class__ is not int or params.n != 1:
        most = max_sequences()
        params.n = checks.integer("n", params.n, 1, most, f"it must be an int from 1 to {most}")
    optional = "it must be None or an int of at least 1"
    if params.max_tokens is not None:
        params.max_tokens = checks.integer("max_tokens", params.max_tokens, 1, MAX_INT, optional)
    if params.stream_interval is not None:
        interval = params.stream_interval
        params.stream_interval = checks.integer("stream_interval", interval, 1, MAX_INT, optional)
    if params.truncate_prompt_tokens is not None:
        name, allowed = "truncate_prompt_tokens", "it must be None or an int of at least -1"
        checks.integer(name, params.truncate_prompt_tokens, -1, MAX_INT, allowed)
    count = "it must be an int of at least 0"
    params.min_tokens = checks.integer("min_tokens", params.min_tokens, 0, MAX_INT, count)
    start = params.routed_experts_prompt_start
    params.routed_experts_prompt_start = checks.integer(
        "routed_experts_prompt_start", start, 0, MAX_INT, count
    )
    check_min_tokens(params)


def check_min_tokens(params: SamplingFields) -> None:
    """Raise if `min_tokens` exceeds `max_tokens`; checked again when a None becomes a number."""
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        allowed = f"it must be at most max_tokens, which is {params.max_tokens}"
        raise InvalidParameter("min_tokens", params.min_tokens, allowed)


def _check_penalties(params: SamplingFields) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = checks.number(
            name, getattr(params, name), -2, 2, "it must be a number from -2 to 2"
        )
        setattr(params, name, value)
    params.repetition_penalty = checks.number(
        "repetition_penalty",
        params.repetition_penalty,
        checks.MIN_FLOAT32,
        checks.MAX_FLOAT32,
        "it must be a finite number above 0",
    )


def _check_distribution(params: SamplingFields) -> None:
    allowed = "it must be a number above 0 and at most 1"
    params.top_p = checks.number("top_p", params.top_p, checks.MIN_FLOAT32, 1, allowed)
    allowed = "it must be an int of at least 1, or 0 or -1 for no limit"
    params.top_k = checks.integer("top_k", params.top_k, -1, MAX_INT, allowed)
    params.min_p = checks.number("min_p", params.min_p, 0, 1, "it must be a number from 0 to 1")
    _check_temperature(params)
    if params.seed is not None:
        allowed = "it must be None or an int that fits 64 bits"
        seed = checks.integer("seed", params.seed, -(2**63), 2**64 - 1, allowed)
        params.seed = None if seed == -1 else seed


def _check_temperature(params: SamplingFields) -> None:
    given = params.temperature
    temperature = checks.number("temperature", given, 0, 2, "it must be a number from 0 to 2")
    if 0 < temperature < LOWEST_TEMPERATURE:
        logger.warning("temperature=%s is raised to %s; 0 is greedy", given, LOWEST_TEMPERATURE)
        temperature = LOWEST_TEMPERATURE
    params.temperature = temperature
    if temperature == 0:
        # greedy takes the likeliest token, whatever they say
        params.top_p, params.top_k, params.min_p = 1.0, 0, 0.0
        if params.n > 1:
            allowed = "it must be 1 when temperature is 0, because greedy completions are equal"
            raise InvalidParameter("n", params.n, allowed)


def _check_stops(params: SamplingFields) -> None:
    params.stop = checks.texts("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
    if params.stop and not params.detokenize:
        allowed = "stop strings need detokenize=True"
        raise InvalidParameter("stop", params.stop, allowed, "Or give stop_token_ids.")
    ids = params.stop_token_ids
    ids = [] if ids is None else checks.integers("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
    params.stop_token_ids = checks.without_repeats(ids)
    params.bad_words = checks.texts(
        "bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORDS_CHARS
    )


def scores_prompt(params: SamplingFields) -> bool:
    """Whether log-probabilities of the prompt's tokens are to be computed."""
    return params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None


def _check_logprobs(params: SamplingFields) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            # True means one logprob in the reference
            value = 1 if value is True else value
            allowed = "it must be None, an int of at least 0, or -1 for the whole vocabulary"
            setattr(params, name, checks.integer(name, value, -1, MAX_INT, allowed))
    if params.logprob_token_ids is not None:
        ids = checks.integers("logprob_token_ids", params.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        params.logprob_token_ids = ids
    if (rows := params.prompt_logprob_token_ids) is not None:
        checked = _scored_rows(rows)
        if isinstance(rows, list | tuple):  # arrays stay as they are until a request is added
            params.prompt_logprob_token_ids = checked
    start = params.prompt_logprob_start
    if start is not None:
        allowed = "it must be None or an int of at least 0, together with prompt_logprob_token_ids"
        checks.integer("prompt_logprob_start", start, 0, MAX_INT, allowed)
        if params.prompt_logprob_token_ids is None:
            raise InvalidParameter("prompt_logprob_start", start, allowed)
    if params.skip_reading_prefix_cache is None:
        # cached positions have no logits
        params.skip_reading_prefix_cache = scores_prompt(params)
    checks.flag("skip_reading_prefix_cache", params.skip_reading_prefix_cache)


def _check_token_lists(params: SamplingFields) -> None:
    allowed_ids = params.allowed_token_ids
    if allowed_ids is not None:
        params.allowed_token_ids = checks.integers("allowed_token_ids", allowed_ids, MAX_LIST)
        if not params.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", [], "it must be None or have an id")
    if params.logit_bias is not None:
        params.logit_bias = _bias(params.logit_bias)
    trace = params.trace_decode_token_ids
    if trace is not None:
        params.trace_decode_token_ids = checks.integers("trace_decode_token_ids", trace, MAX_LIST)
        if not params.trace_decode_token_ids:
            raise InvalidParameter("trace_decode_token_ids", [], "it must be None or have an id")


def check_num_biases(value: Sized) -> None:
    """Raise InvalidParameter for too many of them."""
    if len(value) > MAX_BIASES:
        allowed = f"it may have at most {MAX_BIASES} entries"
        hint = "Name the ids that may be drawn with allowed_token_ids."
        raise InvalidParameter("logit_bias", f"<{len(value)} items>", allowed, hint)


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidType("logit_bias", value, "it must be a dict from token id to number")
    check_num_biases(value)
    checks.integers("logit_bias", list(value), MAX_BIASES)
    allowed = f"each bias must be a number from -{MAX_BIAS:g} to {MAX_BIAS:g}, or -inf"
    return {
        int(token_id): bias
        # outside the bounds of a bias: it forbids the token
        if bias == float("-inf")
        else checks.number("logit_bias", bias, -MAX_BIAS, MAX_BIAS, allowed)
        for token_id, bias in value.items()
    }


def _check_parts(params: SamplingFields) -> None:
    budget = params.thinking_token_budget
    if budget is not None:
        allowed = "it must be None, -1 or an int of at least 0"
        budget = checks.integer("thinking_token_budget", budget, -1, MAX_INT, allowed)
        params.thinking_token_budget = None if budget == -1 else budget
    _is_a("output_kind", params.output_kind, RequestOutputKind)
    if params.structured_outputs is not None:
        _is_a("structured_outputs", params.structured_outputs, StructuredOutputsParams)
    if params.repetition_detection is not None:
        _is_a("repetition_detection", params.repetition_detection, RepetitionDetectionParams)
    if params.extra_args is not None:
        _is_a("extra_args", params.extra_args, dict)
        if not all(isinstance(key, str) for key in params.extra_args):
            raise InvalidType("extra_args", params.extra_args, "its keys must be str")
        checks.wire_ints("extra_args", params.extra_args)


def _is_a(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidType(name, value, f"it must be a {kind.__name__}")


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
        allowed = f"with logprob_token_ids it must be None or their number, {len(listed)}"
        raise InvalidParameter("logprobs", params.logprobs, allowed)


def _verify_prompt_logprob_ids(params: SamplingFields, vocab_size: int, limit: int) -> None:
    """Check the rows, and have them as lists of ints."""
    name = "prompt_logprob_token_ids"
    if params.prompt_logprob_token_ids is None:
        return
    rows = _scored_rows(params.prompt_logprob_token_ids)
    width = max(map(len, rows))
    if width > limit:
        hint = f"Raise the engine's max_logprobs to at least {width}." if limit < vocab_size else ""
        allowed = f"a row may have at most {limit} ids"
        raise InvalidParameter(name, f"<a row of {width} ids>", allowed, hint)
    for row in filter(None, rows):
        # two comparisons in C for each row instead of one in Python for each id
        for token_id in (min(row), max(row)):
            if not -1 <= token_id < vocab_size:
                allowed = f"it is out of vocabulary: ids are 0 to {vocab_size - 1}, or -1"
                raise InvalidParameter(name, token_id, allowed)
    params.prompt_logprob_token_ids = rows


def _scored_rows(given: Any) -> list[list[int]]:
    """Rows of ids, given as lists or as an integer array [rows, ids]."""
    name, allowed = "prompt_logprob_token_ids", "a list of lists of ints, or an array [rows, ids]"
    if not isinstance(given, list | tuple) and len(getattr(given, "shape", ())) == 2:
        given = given.tolist()
    rows = [
        checks.integers(name, row, MAX_SCORED)
        for row in checks.sequence(name, given, allowed, MAX_SCORED)
    ]
    if not any(rows):
        raise InvalidParameter(name, rows, "it must have at least one id")
    return rows


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
