"""The fields that every generating request has in common, and how they become `SamplingParams`.

A field that is null counts as left out. A field that is not declared is refused by the decoder; a
few that change no answer are declared and accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quire.errors import InvalidParameter, NotBuiltYet
from quire.params import SamplingParams
from quire.params.kinds import RequestOutputKind
from quire.params.structured import RepetitionDetectionParams
from quire.server.openai.structured import GuidedFields
from quire.server.request_limits import Limits

_PASSED_ON = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("bad_words", "allowed_token_ids", "logit_bias", "logprob_token_ids"),
    *("prompt_logprobs", "thinking_token_budget", "stream_interval"),
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside its deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RepetitionFields(msgspec.Struct, forbid_unknown_fields=True):
    """When repetition ends the output."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class GenerationFields(GuidedFields, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions share."""

    stream_options: StreamOptions | None = None

    n: int | None = None
    max_tokens: int | None = None
    spaces_between_special_tokens: bool | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionFields | None = None
    thinking_token_budget: int | None = None
    stream_interval: int | None = None

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    use_beam_search: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None

    def check_amounts(self, limits: Limits, num_prompts: int = 1) -> None:
        """Raise InvalidParameter for more completions, stop strings or ids than a request may have:
        here, because each of them costs work before the engine looks at them.
        """
        if num_prompts * (self.n or 1) > limits.completions:
            allowed = f"a request may have {limits.completions} completions in all"
            raise InvalidParameter("n", self.n, allowed)
        if isinstance(self.stop, list) and len(self.stop) > limits.stop_strings:
            allowed = f"a request may have {limits.stop_strings} stop strings"
            raise InvalidParameter("stop", len(self.stop), allowed)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if len(getattr(self, name) or ()) > limits.token_ids:
                allowed = f"the model has {limits.token_ids} tokens"
                raise InvalidParameter(name, len(getattr(self, name)), allowed)

    def refuse_unbuilt(self) -> None:
        """Raise NotBuiltYet for a documented field that this release does not implement."""
        if self.use_beam_search:
            hint = "Leave it out; LLM.beam_search offline has it."
            raise NotBuiltYet("use_beam_search", True, hint)
        if self.kv_transfer_params:
            raise NotBuiltYet("kv_transfer_params", self.kv_transfer_params, "Leave it out.")

    def check_stream(self) -> None:
        """Raise InvalidParameter for what goes with a stream only, or not with one."""
        if self.stream_options is not None and not self.stream:
            allowed = "it goes with stream=true only"
            raise InvalidParameter("stream_options", self.stream_options, allowed)
        if self.stream and self.prompt_logprobs is not None:
            allowed = "a stream has none"
            raise InvalidParameter("prompt_logprobs", self.prompt_logprobs, allowed)

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The parameters of the engine: what the request gives, else `defaults`, else neutral.

        Raises InvalidParameter.
        """
        given = {name: getattr(self, name) for name in _PASSED_ON}
        fields = {**defaults, **{k: value for k, value in given.items() if value is not None}}
        fields |= {"n": self.n, "max_tokens": max_tokens, "logprobs": logprobs}
        fields["structured_outputs"] = self.shape()
        if (found := self.repetition_detection) is not None:
            fields["repetition_detection"] = RepetitionDetectionParams(
                found.max_pattern_size, found.min_pattern_size, found.min_count
            )
        streamed = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        extra = dict(self.vllm_xargs or {})
        if self.timeout_s is not None:
            extra["timeout_s"] = self.timeout_s
        params = SamplingParams.from_optional(
            **{**fields, "output_kind": streamed, "extra_args": extra or None}
        )
        params.max_tokens = max_tokens
        return params
