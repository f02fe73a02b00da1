"""The fields of `SamplingParams`, for the modules that check them."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.params import checks
from quire.params.kinds import RequestOutputKind
from quire.params.structured import RepetitionDetectionParams, StructuredOutputsParams


class SamplingFields(msgspec.Struct, omit_defaults=True, metaclass=checks.CheckedMeta):
    """Every parameter of one generation with its default."""

    n: int = 1
    """Number of completions; child i draws with seed + i."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """The first two penalties count only the output, the third prompt and output."""
    temperature: float = 1.0
    """0 is greedy; what lies between 0 and 0.01 counts as 0.01."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 turn it off."""
    min_p: float = 0.0
    seed: int | None = None
    """None and -1: drawn when the request is added."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as fit after the prompt."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of the likeliest tokens to report; 0: the chosen one alone, -1: all."""
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Report exactly these tokens (and the chosen one) instead of the likeliest."""
    flat_logprobs: bool = False
    """Logprobs come as `FlatLogprobs` instead of a list of dicts."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    """Tokens between DELTA outputs; at least the engine's own interval."""
    skip_clone: bool = False
    """`clone()` may be shallow, because the containers are never modified."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    """Arguments of custom logits processors."""
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    prompt_logprob_token_ids: list[list[int]] | None = None
    """Ids to score as predictions of prompt tokens, a row for each token from the one after
    `prompt_logprob_start` on: lists, or an integer array [rows, ids]; -1 scores -inf.
    """
    prompt_logprob_start: int | None = None
    """The position whose next token the first row scores; None: 0."""
    trace_decode_token_ids: list[int] | None = None
    """The whole output, which the model scores: nothing is drawn, and nothing else ends it."""
    skip_reading_prefix_cache: bool | None = None
    """None: only with prompt logprobs, which need every position computed."""
    watermarking: Any = None
    truncate_prompt_tokens: int | None = None
    """At most as many tokens of the prompt, its last ones; -1: as many as fit."""

    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _bad_words_token_ids: list[list[int]] | None = None
