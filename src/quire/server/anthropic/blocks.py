"""Makes the content blocks of a request into chat messages."""

from __future__ import annotations

from typing import Any

from quire.encodable import to_json
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet
from quire.server.http.fields import text_in

Message = dict[str, Any]


def conversation(messages: list[dict[str, Any]]) -> list[Message]:
    """Messages as a chat template takes them; results of tools become messages of their own.

    Raises InvalidParameter for what is malformed, NotBuiltYet for a block that is not served.
    """
    made: list[Message] = []
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidParameter(f"{name}.role", role, "user or assistant is expected")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif isinstance(content, list):
            made += _of_blocks(role, content, f"{name}.content")
        else:
            raise InvalidParameter(f"{name}.content", content, "a string or blocks are expected")
    return made


def texts_of(blocks: list[Any], name: str) -> str:
    """The text of blocks that may only be text."""
    return "\n".join(_text(block, f"{name}[{number}]") for number, block in enumerate(blocks))


def _text(block: Any, name: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else block
    if not isinstance(block, dict) or kind != "text":
        raise _unserved(f"{name}.type", kind)
    return text_in(block, "text", name)


def _unserved(place: str, kind: Any) -> NotBuiltYet:
    hint = "Only text can be sent here."
    if kind in ("document", "search_result"):
        hint = 'Send what it says as a block of the type "text".'
    return NotBuiltYet(place, kind, hint)


def _of_blocks(role: str, blocks: list[Any], name: str) -> list[Message]:
    results: list[Message] = []
    parts: list[Message] = []
    message: Message = {"role": role, "content": None}
    for number, block in enumerate(blocks):
        place = f"{name}[{number}]"
        match block.get("type") if isinstance(block, dict) else block:
            case "text":
                parts.append({"type": "text", "text": text_in(block, "text", place)})
            case "image":
                parts.append(_image(block, place))
            case "thinking":
                message["reasoning"] = message.get("reasoning", "") + text_in(
                    block, "thinking", place
                )
            # encrypted for Anthropic's servers, and of no use to this model
            case "redacted_thinking":
                continue
            case "tool_use":
                message.setdefault("tool_calls", []).append(_call(block, place))
            case "tool_result":
                results.append(_result(block, place))
            case kind:
                raise _unserved(f"{place}.type", kind)
    if parts:
        message["content"] = _joined(parts)
    says_something = bool(parts) or "tool_calls" in message or "reasoning" in message
    # results first: templates want them right after the calls that they answer
    return [*results, message] if says_something or not results else results


def _call(block: dict[str, Any], name: str) -> dict[str, Any]:
    given = block.get("input")
    arguments = to_json({} if given is None else given).decode()
    function = {"name": text_in(block, "name", name), "arguments": arguments}
    return {"id": text_in(block, "id", name), "type": "function", "function": function}


def _result(block: dict[str, Any], name: str) -> Message:
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise InvalidParameter(f"{name}.content", content, "a string or blocks are expected")
    call_id = text_in(block, "tool_use_id", name)
    if isinstance(content, list):
        content = _joined([_shown(each, f"{name}.content[{i}]") for i, each in enumerate(content)])
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _shown(block: Any, name: str) -> Message:
    if isinstance(block, dict) and block.get("type") == "image":
        return _image(block, name)
    return {"type": "text", "text": _text(block, name)}


def _image(block: dict[str, Any], name: str) -> Message:
    """A picture in the form of chats, whose source is read there."""
    source = block.get("source")
    if not isinstance(source, dict):
        raise InvalidType(
            f"{name}.source", source, "an image has an object with base64 data or a url"
        )
    if source.get("type") == "file":
        raise NotBuiltYet(f"{name}.source.type", "file", "Send the picture as base64, or its url.")
    return {"type": "image", "source": source}


def _joined(parts: list[Message]) -> str | list[Message]:
    """The content of a message: a text, unless it has pictures."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)
