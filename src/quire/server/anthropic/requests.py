"""The body of `POST /v1/messages`, and the chat request that it becomes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.errors import InvalidParameter, NotBuiltYet
from quire.server.anthropic.blocks import conversation, texts_of
from quire.server.http.json_body import PlainObject, objects_in
from quire.server.openai.hosted_tools import without_hosted
from quire.server.openai.requests import ChatRequest, Effort
from quire.server.openai.sampling_fields import Salt
from quire.server.openai.structured import dialect_field


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may ask for."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None

    max_uses: int | None = None
    max_content_tokens: int | None = None
    allowed_domains: list[str] | None = None
    blocked_domains: list[str] | None = None
    user_location: dict[str, Any] | None = None
    citations: Any = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether a tool must be asked for."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks first, and how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Effort and shape of an answer."""

    effort: Effort | None = None
    format: dict[str, Any] | None = None


_OF_MESSAGES = frozenset({"role", "content"})
_OF_BLOCKS = frozenset(
    {
        *("type", "text", "thinking", "signature", "data", "id", "name", "input", "tool_use_id"),
        *("content", "is_error", "source", "title", "context"),
    }
)


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`. Clients send the whole request that they would send to
    `/v1/messages`; what decides only the answer has no effect on the count.
    """

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        *("max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p", "metadata"),
        *("service_tier", "cache_control"),
    )

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: Any = None

    def leave_out(self) -> list[str]:
        if self.tools:
            self.tools, places = without_hosted(self.tools, self.tool_choice)
            return places
        return []

    def objects(self) -> Iterator[PlainObject]:
        """The messages and their blocks: see `FieldRules.settle`."""
        yield from objects_in("messages", self.messages, _OF_MESSAGES)
        for index, message in enumerate(self.messages):
            yield from objects_in(f"messages[{index}].content", message.get("content"), _OF_BLOCKS)
        yield from objects_in("system", self.system, _OF_BLOCKS)

    def as_chat(self, **more: Any) -> ChatRequest:
        """The request as one of chats. Raises InvalidParameter for a block that is not served."""
        messages = conversation(self.messages)
        if self.system:
            text = self.system if isinstance(self.system, str) else texts_of(self.system, "system")
            messages.insert(0, {"role": "system", "content": text})
        config = self.output_config or OutputConfig()
        choice = self.tool_choice
        # "none" and "auto" ask for no call, and are right without tools
        if choice is not None and not self.tools and choice.type not in ("none", "auto"):
            raise InvalidParameter("tool_choice", choice.type, "it goes with tools only")
        return ChatRequest(
            messages=messages,
            model=self.model,
            continue_final_message=_is_open(messages[-1]) or None,
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=_choice(choice) if self.tools else None,
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            reasoning_effort=config.effort,
            response_format=_format(config.format),
            chat_template_kwargs=self._kwargs(),
            enable_thinking=self.enable_thinking,
            **more,
        )

    def _kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        # adaptive leaves it to the model: its template's default stands
        if self.thinking is not None and self.thinking.type != "adaptive":
            kwargs.setdefault("enable_thinking", self.thinking.type == "enabled")
        return kwargs


_OF_HOSTED_TOOLS = (
    *("max_uses", "max_content_tokens", "allowed_domains", "blocked_domains", "user_location"),
    "citations",
)
_FIELDS = {
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Field of chat, or parameter of the engine -> the field here."""


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`."""

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("metadata", "service_tier", "cache_control")

    max_tokens: int
    cache_salt: Salt | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def field_of(self, parameter: str) -> str:
        """The field that a parameter of the engine, or a field of chat, was made from."""
        if parameter.startswith("tools["):
            return parameter.replace(".function.parameters", ".input_schema")
        return dialect_field(parameter, _FIELDS)

    def generation(self, *, has_reasoning: bool) -> ChatRequest:
        """The chat request that is run. A model without reasoning thinks within any budget."""
        budget = self.thinking.budget_tokens if self.thinking and has_reasoning else None
        return self.as_chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            # deltas, also for a reply that is not streamed: the writer builds the same message from
            # them
            stream=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            thinking_token_budget=budget,
            cache_salt=self.cache_salt,
            vllm_xargs=self.vllm_xargs,
            kv_transfer_params=self.kv_transfer_params,
        )


def _is_open(message: dict[str, Any]) -> bool:
    """Whether an answer goes on with this message, the last one."""
    return (
        message["role"] == "assistant"
        and bool(message["content"])
        # a call waits for its result, and text after it would be another turn
        and ("tool_calls" not in message)
    )


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise NotBuiltYet("tools.type", tool.type, "Only tools that the caller runs exist here.")
    for name in _OF_HOSTED_TOOLS:
        if (value := getattr(tool, name)) is not None:
            raise InvalidParameter(f"tools.{name}", value, "it goes with hosted tools only")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if choice.type == "any":
        return "required"
    return {"type": "function", "function": {"name": choice.name}}


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise InvalidParameter("output_config.format", given.get("type"), "json_schema is expected")
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
