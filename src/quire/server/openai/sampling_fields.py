"""The fields that request bodies of several APIs have in common."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Salt = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]


class RequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The model that is asked, and the treatment of the request; null: default."""

    model: str | None = None
    priority: int | None = None
    request_id: RequestId | None = None
    cache_salt: Salt | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None


class RequestSamplingFields(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The choice of tokens and the end of the output; null: default."""

    stream: bool | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    vllm_xargs: dict[str, Any] | None = None
