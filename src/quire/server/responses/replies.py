"""The bodies of replies: a response and its items."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.openai.replies import TokenLogprobs

Status: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]


class ReasoningTextPart(msgspec.Struct, tag="reasoning_text", tag_field="type"):
    """A piece of reasoning."""

    text: str = ""


class OutputTextPart(msgspec.Struct, tag="output_text", tag_field="type"):
    """A piece of the answer."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprobs] = []


class ReasoningItem(msgspec.Struct, tag="reasoning", tag_field="type"):
    """The model's reasoning before its answer."""

    id: str
    content: list[ReasoningTextPart] = []
    summary: list[Any] = []
    encrypted_content: str | None = None
    status: Status = "in_progress"


class MessageItem(msgspec.Struct, tag="message", tag_field="type"):
    """The answer."""

    id: str
    content: list[OutputTextPart] = []
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"


class CallItem(msgspec.Struct, tag="function_call", tag_field="type"):
    """A call of a tool; `namespace`: the one that it belongs to."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, tag="custom_tool_call", tag_field="type"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: Status = "in_progress"


Item: TypeAlias = ReasoningItem | MessageItem | CallItem | CustomCallItem


class InputDetails(msgspec.Struct):
    """Input tokens by source."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Output tokens by kind."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class RawMessageTokens(msgspec.Struct, tag="raw_message_tokens", tag_field="type"):
    """All that went into the model, or came out of it, as it was."""

    message: str
    tokens: list[int]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response as it is now; its `input_messages` and `output_messages` if they are asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    conversation: dict[str, str] | None = None
    error: Any = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    reasoning: Any = None
    store: bool = True
    temperature: float = 1.0
    text: Any = None
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float = 1.0
    top_logprobs: int = 0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    service_tier: str | None = None
    metadata: dict[str, str] = {}
    input_messages: list[RawMessageTokens] | UnsetType = UNSET
    output_messages: list[RawMessageTokens] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    """Number of tokens of an input."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class CompactedResponse(msgspec.Struct, kw_only=True):
    """A conversation made short: the user's messages and a `compaction` item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage
