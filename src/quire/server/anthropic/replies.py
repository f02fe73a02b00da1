"""The bodies of replies: a message and its blocks."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    """A piece of the answer."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    """The model's reasoning; nothing is signed here."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    """A call of a tool. `input` is the object that its JSON text means."""

    id: str
    name: str
    input: Any = msgspec.field(default_factory=dict)


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """Tokens of a message; those from the prefix cache are not among `input_tokens`. Nothing is
    charged for filling the cache, so `cache_creation_input_tokens` is 0.
    """

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageReply(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[Block] = []
    model: str
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Count(msgspec.Struct):
    """Number of tokens of a prompt."""

    input_tokens: int
    context_management: dict[str, int]
