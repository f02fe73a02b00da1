"""Makes the items of inputs and outputs into chat messages."""

from __future__ import annotations

from typing import Any

from quire.errors import InvalidParameter, NotBuiltYet
from quire.server.http.fields import text_in
from quire.server.responses.compaction import message_of

Message = dict[str, Any]


def conversation(given: str | list[dict[str, Any]], field: str = "input") -> list[Message]:
    """The messages of items: calls and reasoning belong to the assistant's message. `field`: where
    the request has them.

    Raises InvalidParameter for an item that is malformed or of a kind that is not served.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for number, item in enumerate(given):
        _add(messages, item, f"{field}[{number}]")
    return messages


def in_namespace(space: str, name: str) -> str:
    """The model's name of a function of a namespace."""
    return f"{space}.{name}"


def _add(messages: list[Message], item: dict[str, Any], name: str) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item, name)
        case "reasoning":
            summary = _reasoning(item, "summary", name)
            # the summary stands in for reasoning that a server has not shown
            _assistant(messages)["reasoning"] = _reasoning(item, "content", name) or summary
        case "function_call":
            function = {key: text_in(item, key, name) for key in ("name", "arguments")}
            if isinstance(space := item.get("namespace"), str):
                function["name"] = in_namespace(space, function["name"])
            call = {"id": text_in(item, "call_id", name), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "custom_tool_call":
            custom = {key: text_in(item, key, name) for key in ("name", "input")}
            call = {"id": text_in(item, "call_id", name), "type": "custom", "custom": custom}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output" | "custom_tool_call_output":
            content = _content(item, "output", name)
            if content is None:
                raise InvalidParameter(f"{name}.output", content, "a string or parts are expected")
            call_id = text_in(item, "call_id", name)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "compaction" | "compaction_summary":
            messages.append(message_of(item, name))
        case other:
            raise NotBuiltYet(f"{name}.type", other, "Send messages, calls and their outputs.")


def _add_message(messages: list[Message], item: dict[str, Any], name: str) -> None:
    role, content = text_in(item, "role", name), _content(item, "content", name)
    if role != "assistant":
        messages.append({"role": role, "content": content})
        return
    message = _assistant(messages)
    # a second text, or one after calls, is a message of its own
    if message.get("content") is not None or "tool_calls" in message:
        message = {"role": "assistant"}
        messages.append(message)
    message["content"] = content


def _assistant(messages: list[Message]) -> Message:
    """The assistant's message that items go on with."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(item: dict[str, Any], key: str, name: str) -> str | list[Any] | None:
    """A text, or parts whose types are texts."""
    content = item.get(key)
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{name}.{key}", content, "a string or parts are expected")
    for number, part in enumerate(content):
        place, value = f"{name}.{key}[{number}]", part
        if isinstance(part, dict):
            place, value = f"{place}.type", part.get("type", "")
        if not isinstance(value, str):
            raise InvalidParameter(place, value, "a part has a type, which is a string")
    return content


def _reasoning(item: dict[str, Any], key: str, name: str) -> str:
    parts = item.get(key)
    if parts is None:
        return ""
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InvalidParameter(f"{name}.{key}", parts, "a list of parts is expected")
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
