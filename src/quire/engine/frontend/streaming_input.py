"""Prompts that arrive in parts, from an async generator of `StreamingInput`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, InvalidType
from quire.params import RequestOutputKind, SamplingParams


@dataclass(slots=True)
class StreamingInput:
    """The next part of a prompt, and the parameters from here on (None: those before).

    The request answers each part; its answer becomes part of the prompt for the next one. What
    shows the outputs (`output_kind`, `logprobs` and the like) and the seed are those of the first
    part, or of the request where the first part leaves them at their defaults.
    """

    prompt: Any
    sampling_params: SamplingParams | None = None


InputStream = AsyncGenerator[StreamingInput, None]

_OF_THE_WHOLE = (
    *("output_kind", "stream_interval", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids"),
    *("flat_logprobs", "routed_experts_prompt_start", "seed"),
)
"""Parameters that hold from the first output to the last."""
_DEFAULTS = SamplingParams()


def check_streamable(params: object) -> SamplingParams:
    """`params`, if a streamed prompt can have them. Raises InvalidType or InvalidParameter."""
    if not isinstance(params, SamplingParams):
        raise InvalidType("params", params, "a streamed prompt needs SamplingParams")
    if params.n != 1:
        raise InvalidParameter("n", params.n, "a streamed prompt has one completion")
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        allowed = "a streamed prompt has many outputs: use DELTA or CUMULATIVE"
        raise InvalidParameter("output_kind", params.output_kind, allowed)
    if params.prompt_logprob_token_ids is not None:
        name, allowed = "prompt_logprob_token_ids", "a streamed prompt grows while it is computed"
        raise InvalidParameter(name, params.prompt_logprob_token_ids, allowed)
    if params.structured_outputs is not None:
        allowed = "a streamed prompt has many outputs, which have no form"
        raise InvalidParameter("structured_outputs", params.structured_outputs, allowed)
    if params.thinking_token_budget is not None:
        allowed = "a streamed prompt has many outputs"
        raise InvalidParameter("thinking_token_budget", params.thinking_token_budget, allowed)
    if params.stop:
        hint = "Use stop_token_ids."
        raise InvalidParameter("stop", params.stop, "a streamed prompt has no stop strings", hint)
    return params


def params_of_first(part: StreamingInput, params: SamplingParams) -> SamplingParams:
    """The parameters from the first part on, which comes to a request with `params`."""
    if part.sampling_params is None:
        return params
    own = _checked(part.sampling_params, params)
    left = {
        name: getattr(params, name)
        for name in _OF_THE_WHOLE
        if getattr(own, name) == getattr(_DEFAULTS, name)
    }
    return _with(own, left)


def params_of_next(part: StreamingInput, before: SamplingParams) -> SamplingParams:
    """The parameters from a later part on, where those `before` held until then. Raises
    InvalidParameter for another value of what holds for the whole stream.
    """
    if part.sampling_params is None:
        return before
    own = _checked(part.sampling_params, before)
    for name in _OF_THE_WHOLE:
        value, held = getattr(own, name), getattr(before, name)
        if value not in (held, getattr(_DEFAULTS, name)):
            allowed = f"a later part of a prompt has that of the first, {held!r}"
            raise InvalidParameter(name, value, allowed, "Leave it out.")
    return _with(own, {name: getattr(before, name) for name in _OF_THE_WHOLE})


def check_part(part: object) -> StreamingInput:
    """`part`, if it is one. Raises InvalidType."""
    if not isinstance(part, StreamingInput):
        raise InvalidType("prompt", part, "the parts of a streamed prompt are StreamingInputs")
    return part


def _checked(own: object, before: SamplingParams) -> SamplingParams:
    params = check_streamable(own)
    limit = _timeout_s(params)
    if limit not in (None, _timeout_s(before)):
        allowed = "a request has one time limit, for all parts of its prompt"
        raise InvalidParameter("extra_args['timeout_s']", limit, allowed)
    return params


def _timeout_s(params: SamplingParams) -> object:
    return params.extra_args.get("timeout_s") if isinstance(params.extra_args, dict) else None


def _with(params: SamplingParams, fields: dict[str, Any]) -> SamplingParams:
    own = params.clone()
    for name, value in fields.items():
        setattr(own, name, value)
    return own
