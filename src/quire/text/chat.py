"""Chat messages to a prompt: the messages of a request are converted to the one form that templates
get.

The rules are those that clients of OpenAI-like servers rely on: contents as text or as parts, tool
calls with parsed arguments, reasoning, the developer role. A part with audio or video is refused by
name, and one with an image unless the model takes pictures.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.encodable import with_plain_texts
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, RequestError
from quire.text.chat_template import ChatTemplate, plain_data
from quire.text.chat_tools import (
    describe_tools,
    with_calls_as_text,
    with_system_in_user,
    with_system_text,
)
from quire.text.legacy_calls import with_tool_calls
from quire.text.templates.template_forms import ContentFormat, ContentFormats, with_call_forms
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CONTENT_FORMATS = ("auto", "string", "openai")
# Part type -> the key that has its text.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
MEDIA_PARTS = (
    "image",
    "image_url",
    "image_pil",
    "image_embeds",
    "input_image",
    "audio",
    "audio_url",
    "audio_embeds",
    "input_audio",
    "video",
    "video_url",
    "prompt_embeds",
)
PICTURE: Mapping[str, str] = {"type": "image"}
"""Stands in a message for a picture that was taken out of it."""
# Names that choose what happens to the rendered text; as template variables they would do nothing
# or harm.
RESERVED_TEMPLATE_NAMES = ("chat_template", "tokenize")
# Names that the call's own arguments decide.
CALL_NAMES = ("messages", "tools", "add_generation_prompt", "continue_final_message")

Message = dict[str, Any]
JoinParts = Callable[[Sequence[str | None]], str]
"""A message's texts, with None where a picture is -> its content, for templates of text alone."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    chat_template: str | None = None,
    content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    tools_as_text: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    join_pictures: JoinParts | None = None,
) -> str:
    """The prompt of one conversation, to be encoded without special tokens.

    `chat_template` is a template's text or the name of one of the tokenizer's. `content_format`
    "auto" reads the format from the template. `tools_as_text`: tools are described in the system
    message, calls and results are text of messages; None: if the template reads no `tools`.
    `chat_template_kwargs` become template variables as far as the template reads them; the call's
    own settings rule over them. `join_pictures`: of a model that takes pictures, which stand in
    messages as `PICTURE`. Raises RequestError (or a subclass that names the parameter).
    """
    template = tokenizer.compiled_chat_template(chat_template, tools)
    formats = resolve_content_format(content_format, template)
    conversation = normalize_messages(messages, formats, template.source, join_pictures)
    as_text = not template.knows_tools if tools_as_text is None else tools_as_text
    variables = {
        **tokenizer.special_tokens_map,
        **_template_variables(template, chat_template_kwargs or {}),
        "tools": None if tools is None or as_text else list(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    variables.setdefault("documents", None)
    render = template.render_open if continue_final_message else template.render
    if not as_text:
        if any("tool_calls" in message for message in conversation):
            conversation = with_call_forms(conversation, template.call_forms)
        return render(conversation, variables, has_null_contents=True)
    if any("tool_calls" in message or message["role"] == "tool" for message in conversation):
        conversation = with_calls_as_text(conversation)
    if not tools:
        return render(conversation, variables)
    return _render_described(render, conversation, variables, describe_tools(tools), formats)


def _render_described(
    render: Callable[[Sequence[Message], Mapping[str, Any]], str],
    conversation: Sequence[Message],
    variables: Mapping[str, Any],
    description: str,
    formats: ContentFormats,
) -> str:
    """Render with a description of the tools in the system message, or where the template takes no
    system message, in the user's first one.
    """
    as_parts = formats.by_role.get("system", formats.default) == "openai"
    described = with_system_text(conversation, description, as_parts=as_parts)
    try:
        text = render(described, variables)
    except RequestError:
        text = ""
    return text if description in text else render(with_system_in_user(described), variables)


def resolve_content_format(content_format: str, template: ChatTemplate) -> ContentFormats:
    """The formats to use: the given one for all roles, or for "auto" the template's.

    Raises InvalidParameter for another name.
    """
    if content_format == "auto":
        return template.content_formats
    if content_format not in CONTENT_FORMATS:
        raise InvalidParameter(
            "chat_template_content_format", content_format, f"one of {CONTENT_FORMATS} is expected"
        )
    if content_format != template.content_format:
        logger.warning(
            "chat_template_content_format=%r is used, although the template looks like %r.",
            content_format,
            template.content_format,
        )
    return ContentFormats("openai" if content_format == "openai" else "string")


def normalize_messages(
    messages: Sequence[Any],
    formats: ContentFormats,
    template_source: str,
    join_pictures: JoinParts | None = None,
) -> list[Message]:
    """Messages as a template is given them; new objects, the caller's stay as they were.
    `join_pictures`: see `render_chat`.

    Raises RequestError naming the message and part that cannot be served.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "messages must be a list with at least one message.", parameter="messages"
        )
    plain = [plain_data(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if any(map(_is_legacy, plain)):
        plain = with_tool_calls(plain)
    whole = [
        _normalize(message, formats, f"messages[{i}]", join_pictures)
        for i, message in enumerate(plain)
    ]
    has_developer = any(message["role"] == "developer" for message in whole)
    # a template that knows the role compares with its name
    knows_developer = any(f"{quote}developer{quote}" in template_source for quote in "\"'")
    if not has_developer or knows_developer:
        return whole
    return _with_one_system_message(whole)


def _is_legacy(message: Any) -> bool:
    """Whether a message has the form of function calls before tools."""
    return isinstance(message, dict) and (
        message.get("function_call") is not None or message.get("role") == "function"
    )


def _normalize(
    message: Any, formats: ContentFormats, name: str, join_pictures: JoinParts | None
) -> Message:
    if not isinstance(message, dict):
        raise InvalidType(name, message, "an object with role and content is expected")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidParameter(f"{name}.role", role, "a string is expected")
    content = message.get("content")
    parts = content_parts(content, f"{name}.content", takes_pictures=join_pictures is not None)
    if message.get("tool_calls") and not any(part.get("text", True) for part in parts):
        content, parts = "", []  # null and no text are the same where calls follow
    form = formats.by_role.get(role, formats.default)
    if form == "either":
        form = "openai" if isinstance(content, list | tuple) else "string"
    normal: Message = {"role": role, "content": _content(parts, role, form, name, join_pictures)}
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            normal[key] = message[key]
    if role == "assistant":
        _copy_assistant_keys(message, normal, name)
    elif role == "tool" and message.get("tool_call_id") is not None:
        normal["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        normal["tools"] = message["tools"]
    return normal


def content_parts(content: Any, name: str, *, takes_pictures: bool) -> list[Message]:
    """The content of a message as a list of parts of type "text", "image" or "tool_reference";
    parts whose text is null are left out. `takes_pictures`: it may have `PICTURE`. Raises
    RequestError for parts of other types, and for malformed ones.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        raise InvalidType(name, content, "a string, null or a list of parts is expected")
    parts = [_part(part, f"{name}[{i}]", takes_pictures) for i, part in enumerate(content)]
    return [part for part in parts if part is not None]


def _part(part: Any, name: str, takes_pictures: bool) -> Message | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise InvalidType(name, part, "a string or an object with a type is expected")
    if takes_pictures and part == PICTURE:
        return dict(PICTURE)
    kind = _part_type(part, name)
    if kind == "tool_reference":
        return part
    if kind not in TEXT_PARTS:
        supported = [*TEXT_PARTS, "tool_reference"]
        raise InvalidParameter(f"{name}.type", kind, f"the supported types are {supported}")
    text = part.get(TEXT_PARTS[kind])
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidType(f"{name}.{TEXT_PARTS[kind]}", text, "a string is expected")
    extra = {key: value for key, value in part.items() if key not in ("type", TEXT_PARTS[kind])}
    return {"type": "text", "text": text, **extra}


def _part_type(part: Message, name: str) -> Any:
    """The part's type, guessed from a medium's key where it is missing; media are refused here."""
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in (*MEDIA_PARTS, "refusal") if key in part), None)
    elif not isinstance(kind, str):
        raise InvalidType(f"{name}.type", kind, "a string is expected")
    if kind == "prompt_embeds":  # an engine with the option has taken them out
        hint = "You must set `--enable-prompt-embeds` to input `prompt_embeds`."
        raise InvalidParameter(f"{name}.type", kind, "the engine takes no embeddings", hint)
    if kind in MEDIA_PARTS:
        raise NotBuiltYet(f"{name}.type", kind, "Only text can be sent to this engine.")
    return kind


def _content(
    parts: list[Message],
    role: str,
    content_format: ContentFormat,
    name: str,
    join_pictures: JoinParts | None,
) -> str | list[Message]:
    all_text = all(part["type"] == "text" for part in parts)
    if content_format == "openai" and not (role == "tool" and all_text):
        return parts
    if join_pictures is not None and PICTURE in parts:
        return join_pictures([part.get("text") for part in parts])
    if not all_text:
        raise RequestError(
            f"{name} has a tool_reference part, and the chat template takes contents as text only; "
            f"use a template that loops over parts, or chat_template_content_format='openai'.",
            parameter="messages",
        )
    return "\n".join(part["text"] for part in parts)


def _copy_assistant_keys(message: Message, normal: Message, name: str) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise InvalidType(f"{name}.tool_calls", calls, "a list is expected")
    if calls:
        normal["tool_calls"] = [
            _tool_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        normal["reasoning"] = normal["reasoning_content"] = reasoning


def _tool_call(call: Any, name: str) -> Message:
    if not isinstance(call, dict):
        raise InvalidType(name, call, "an object is expected")
    if call.get("type") == "custom":
        call = _function_call(call, name)
    if call.get("type") != "function":
        allowed = "only 'function' exists, and 'custom'"
        raise InvalidParameter(f"{name}.type", call.get("type"), allowed)
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidType(f"{name}.function", function, "an object is expected")
    arguments = _parsed_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _function_call(call: Message, name: str) -> Message:
    """A call of a custom tool as one of a function with the input as its argument."""
    custom = call.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
        raise InvalidType(f"{name}.custom", custom, "an object with name and input is expected")
    function = {"name": custom.get("name"), "arguments": {"input": custom["input"]}}
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": function}


def _parsed_arguments(arguments: Any) -> Any:
    """Templates write arguments with `tojson`, so they get the object, also where a model wrote it
    as a string of JSON. No arguments are an empty object; what is not an object stays as it is.
    """
    for _ in range(2):
        if isinstance(arguments, str):
            try:
                decoded = json.loads(arguments)
            except (ValueError, RecursionError):
                break
            arguments = decoded if isinstance(decoded, dict | str | None) else arguments
    # JSON may escape lone surrogates, as a model wrote it
    return {} if arguments in (None, "") else with_plain_texts(arguments)


def _with_one_system_message(messages: list[Message]) -> list[Message]:
    """Developer messages become system ones, and all of these one message of text at the front."""
    is_system = [message["role"] in ("system", "developer") for message in messages]
    texts = [_text(m["content"]) for m, system in zip(messages, is_system, strict=True) if system]
    others = [m for m, system in zip(messages, is_system, strict=True) if not system]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text(content: str | list[Message]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _template_variables(template: ChatTemplate, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given variables that the template reads; the reserved ones are refused."""
    for name in RESERVED_TEMPLATE_NAMES:
        if name in given:
            raise InvalidParameter(
                f"chat_template_kwargs.{name}", given[name], "this name is reserved"
            )
    readable = template.variables.difference(CALL_NAMES)
    return {name: value for name, value in given.items() if name in readable}
