"""Prompts that arrive in parts, from an async generator of `StreamingInput`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, InvalidType
from quire.params import RequestOutputKind, SamplingParams


@dataclass(slots=True)
class StreamingInput:
    """The next part of a prompt, and the parameters from here on (None: those of the request).

    The request answers each part; its answer becomes part of the prompt for the next one.
    """

    prompt: Any
    sampling_params: SamplingParams | None = None


InputStream = AsyncGenerator[StreamingInput, None]


def check_streamable(params: object) -> None:
    """Raise InvalidType or InvalidParameter for parameters that a streamed prompt cannot have."""
    if not isinstance(params, SamplingParams):
        raise InvalidType("params", params, "a streamed prompt needs SamplingParams")
    if params.n > 1:
        raise InvalidParameter("n", params.n, "a streamed prompt has one completion")
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        allowed = "a streamed prompt has many outputs: use DELTA or CUMULATIVE"
        raise InvalidParameter("output_kind", params.output_kind, allowed)
    if params.structured_outputs is not None:
        form = params.structured_outputs.kind
        allowed = "a streamed prompt has many outputs, which have no form"
        raise InvalidParameter("structured_outputs", form, allowed)
    if params.thinking_token_budget is not None:
        allowed = "a streamed prompt has many outputs"
        raise InvalidParameter("thinking_token_budget", params.thinking_token_budget, allowed)
    if params.stop:
        hint = "Use stop_token_ids."
        raise InvalidParameter("stop", params.stop, "a streamed prompt has no stop strings", hint)
