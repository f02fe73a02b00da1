"""Bodies of replies: whole ones have every field, chunks those that mean something there."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Sources of the prompt tokens, and the number of those that stand for pictures."""

    cached_tokens: int | None = None
    multimodal_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """Completion tokens by kind."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of the prompt(s) and of all completions."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class StreamUsage(Usage, omit_defaults=True):
    """Usage in a stream: what is not known is left out."""


class TokenLogprob(msgspec.Struct):
    """One token with its natural logarithm of probability and its bytes in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprobs(TokenLogprob):
    """A generated token and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob] = []


class ChatLogprobs(msgspec.Struct):
    """One entry per generated token."""

    content: list[TokenLogprobs] | None = None


class FunctionCall(msgspec.Struct):
    """A call of a tool: its name and the JSON text of its arguments."""

    name: str
    arguments: str


class CustomCall(msgspec.Struct):
    """A call of a custom tool: its name and the text that it is given."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct):
    """One call in an answer, of a function or of a custom tool."""

    id: str
    function: FunctionCall | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"
    custom: CustomCall | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """An answer. `content` is null when all of the text was something else; `reasoning_content` is
    `reasoning` again, for clients that know it by this name.
    """

    role: str
    content: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: FunctionCall | None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class ChatReply(msgspec.Struct, kw_only=True):
    """The whole reply of a chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: Any = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    metrics: Any = None


class FunctionDelta(msgspec.Struct):
    """A piece of a call: the name in the first one, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomDelta(msgspec.Struct):
    """A piece of a call of a custom tool: the name in the first one, then pieces of the input."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """A piece of call number `index` of an answer."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """The addition of a chunk to an answer."""

    role: str | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A chunk's piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | None | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: StreamUsage | None | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: Any | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_text: str | None | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists over the tokens that are reported."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(msgspec.Struct):
    """Completion number `prompt * n + i`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: Any = None
    prompt_token_ids: list[int] | None = None
    routed_experts: str | None = None


class CompletionReply(msgspec.Struct, kw_only=True):
    """The whole reply of a completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    metrics: Any = None


class CompletionChunkChoice(msgspec.Struct):
    """A chunk's piece of one completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: StreamUsage | None | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: Any | UnsetType = UNSET
