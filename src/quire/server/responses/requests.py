"""The body of `POST /v1/responses`, and the chat request that it becomes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.errors import InvalidParameter, NotBuiltYet
from quire.server.http.json_body import PlainObject, objects_in
from quire.server.openai.hosted_tools import without_hosted
from quire.server.openai.requests import ChatRequest, Effort
from quire.server.openai.sampling_fields import RequestSamplingFields
from quire.server.openai.structured import dialect_field
from quire.server.responses.items import conversation, in_namespace

_SAME = (*RequestSamplingFields.__struct_fields__, "chat_template_kwargs", "parallel_tool_calls",
         "kv_transfer_params", "max_tool_calls", "enable_thinking")  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (
    *(_LOGPROBS, "reasoning.encrypted_content", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs"),
    *("computer_call_output.output.image_url", "message.input_image.image_url"),
)
"""Values of `include` for an output; of calls that other servers run there is nothing."""
_OF_ITEMS = frozenset(
    {
        *("type", "role", "content", "id", "status", "call_id", "name", "arguments", "output"),
        *("summary", "encrypted_content", "input", "namespace"),
    }
)
_OF_PARTS = frozenset(
    {"type", "text", "refusal", "logprobs", "image_url", "file_id", "detail", "uuid"}
)


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Effort of reasoning."""

    effort: Effort | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The shape of the answer."""

    format: dict[str, Any] | None = None


class ConversationName(msgspec.Struct, forbid_unknown_fields=True):
    """A conversation by its id."""

    id: str


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Accepted: nothing is padded here in either case."""

    include_obfuscation: bool | None = None


_FIELDS = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""Field of chat, or parameter of the engine -> the field here."""


class ResponsesRequest(RequestSamplingFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`."""

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        *("service_tier", "safety_identifier", "prompt_cache_key", "truncation"),
    )

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    max_output_tokens: int | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None

    kv_transfer_params: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    enable_response_messages: bool | None = None

    conversation: str | ConversationName | None = None
    prompt: Any = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def leave_out(self) -> list[str]:
        if self.tools:
            self.tools, places = without_hosted(self.tools, self.tool_choice)
            return places
        return []

    def objects(self) -> Iterator[PlainObject]:
        """The items and their parts: see `FieldRules.settle`."""
        yield from objects_in("input", self.input, _OF_ITEMS)
        for index, item in enumerate(self.input if isinstance(self.input, list) else ()):
            yield from objects_in(f"input[{index}].content", item.get("content"), _OF_PARTS)

    def check(self) -> None:
        """Raise InvalidParameter for what this server does not do."""
        if self.prompt is not None:
            hint = "Send the text itself: there are no stored prompts here."
            raise NotBuiltYet("prompt", self.prompt, hint)
        for name in self.include or ():
            if name not in _INCLUDES:
                raise InvalidParameter("include", name, f"one of {', '.join(_INCLUDES)}")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            allowed = "it must be at least 1"
            raise InvalidParameter("max_output_tokens", self.max_output_tokens, allowed)
        if self.conversation is not None and self.previous_response_id is not None:
            allowed = "a response goes on from one of conversation and previous_response_id"
            raise InvalidParameter("conversation", self.conversation_id, allowed)
        # its reply comes before the answer, which could not be asked for
        if self.background and self.store is False:
            raise InvalidParameter("background", True, "it needs store=true")

    def field_of(self, parameter: str) -> str:
        """The field that a parameter of the engine, or a field of chat, was made from."""
        if found := re.match(r"tools\[([0-9]+)\]", parameter):
            rest = parameter[found.end() :].replace(".function", "", 1).replace(".custom", "", 1)
            # a namespace is several tools to the engine, so indexes differ
            places = [place for place, _ in _tools(self.tools or [])]
            return places[int(found[1])] + rest
        return dialect_field(parameter, _FIELDS)

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the response belongs to."""
        named = self.conversation
        return named.id if isinstance(named, ConversationName) else named

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def as_chat(self, before: list[dict[str, Any]]) -> ChatRequest:
        """The request as a chat after `before`. Raises InvalidParameter for an item without one."""
        fields = {name: getattr(self, name) for name in _SAME}
        messages = [*before, *conversation(self.input)]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise InvalidParameter("input", self.input, "it must not be empty")
        return ChatRequest(
            **fields,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=_format(self.text),
            tools=[tool for _, tool in _tools(self.tools)] if self.tools else None,
            tool_choice=_choice(self.tool_choice),
        )


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """The response format of chat: the schema one level deeper."""
    if text is None or text.format is None:
        return None
    if text.format.get("type") != "json_schema":
        return text.format
    schema = {name: value for name, value in text.format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}


def _tools(given: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tools as chat has them, after their places; those of a namespace are named with it."""
    for index, tool in enumerate(given):
        if tool.get("type") != "namespace":
            yield f"tools[{index}]", _tool(tool)
            continue
        space, inner = tool.get("name"), tool.get("tools")
        if not isinstance(space, str) or not isinstance(inner, list):
            raise InvalidParameter("tools", tool, "a namespace has a name and tools")
        for number, one in enumerate(inner):
            if not isinstance(one, dict):
                raise InvalidParameter("tools", one, "an object is expected")
            place = f"tools[{index}].tools[{number}]"
            yield place, _tool({**one, "name": in_namespace(space, str(one.get("name")))})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        hint = "Only function and custom tools exist: switch this one off in the client."
        raise NotBuiltYet("tools.type", kind, hint)
    return {"type": kind, kind: {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
