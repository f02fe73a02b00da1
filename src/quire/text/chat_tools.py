"""Tools for chat templates that know none: descriptions, calls and results as plain text.

The description of the tools is added to the system message, calls become text of the assistant's
message, and results become messages of the user. The form of a call is the one that the description
asks for, and that the server's "generic" tool format reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

CALL = "<tool_call>\n{}\n</tool_call>"
RESULT = "<tool_response>\n{}\n</tool_response>"
_EXAMPLE = CALL.format('{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}')
_DESCRIPTION = f"""\
You can call these tools. Each line is one of them, its parameters as a JSON schema:

{{}}

To call a tool, write a JSON object with its name and its arguments, in this form:
{_EXAMPLE}
Write one such object for each call, and nothing after the last one. The results come in the next \
message, in the order of the calls, each between <tool_response> and </tool_response>. If no tool \
is needed, answer in plain text."""
_DESCRIBED = ("name", "description", "parameters")


def describe_tools(tools: Sequence[Any]) -> str:
    """Description of `tools` for the model: name, text and parameters, and a call's form."""
    # not `format`: the example has braces
    return _DESCRIPTION.replace("{}", "\n".join(_described(tool) for tool in tools), 1)


def _described(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if isinstance(function, Mapping):
        function = {key: function[key] for key in _DESCRIBED if function.get(key) is not None}
    return json.dumps(function, ensure_ascii=False)


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Normalized messages without `tool_calls` and without the role "tool".

    Consecutive results are one message of the user, which the user's own next message is added to:
    many templates refuse two messages of the same role in a row.
    """
    made: list[Message] = []
    ends_with_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            content = _mapped(message["content"], RESULT.format)
            message = {"role": "user", "content": content}
        elif calls := message.get("tool_calls"):
            message = _without_calls(message, calls)
        if ends_with_results and message["role"] == "user":
            made[-1] = {**message, "content": _joined(made[-1]["content"], message["content"])}
        else:
            made.append(message)
        ends_with_results = is_result or (ends_with_results and message["role"] == "user")
    return made


def _without_calls(message: Message, calls: Sequence[Message]) -> Message:
    texts = (
        json.dumps({key: call["function"].get(key) for key in ("name", "arguments")},
                   ensure_ascii=False)
        for call in calls
    )  # fmt: skip
    text: Any = "\n".join(CALL.format(text) for text in texts)
    if isinstance(message["content"], list):
        text = [{"type": "text", "text": text}]
    content = message["content"]
    ends_line = isinstance(content, str) and content.endswith("\n")
    content = _joined(content, text, "" if ends_line else "\n") if content else text
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def with_system_text(messages: Sequence[Message], text: str, *, as_parts: bool) -> list[Message]:
    """The messages with `text` at the end of the first system message, or as a new first one."""
    content: Any = [{"type": "text", "text": text}] if as_parts else text
    for place, message in enumerate(messages):
        if message["role"] == "system":
            joined = {**message, "content": _joined(message["content"], content, "\n\n")}
            return [*messages[:place], joined, *messages[place + 1 :]]
    return [{"role": "system", "content": content}, *messages]


def with_system_in_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with the first system message as the beginning of the user's first one, for
    templates that refuse the role "system" or leave such messages out.
    """
    system = next(message for message in messages if message["role"] == "system")
    others = [message for message in messages if message is not system]
    for place, message in enumerate(others):
        if message["role"] == "user":
            joined = _joined(system["content"], message["content"], "\n\n")
            return [*others[:place], {**message, "content": joined}, *others[place + 1 :]]
    return [{**system, "role": "user"}, *others]


def _mapped(content: Any, change: Any) -> Any:
    """A content with its text changed; of parts, all texts together become one."""
    if isinstance(content, str):
        return change(content)
    texts = [part["text"] for part in content if part["type"] == "text"]
    others = [part for part in content if part["type"] != "text"]
    return [{"type": "text", "text": change("\n".join(texts))}, *others]


def _joined(first: Any, second: Any, separator: str = "\n") -> Any:
    """Two contents, texts or lists of parts, as one."""
    if isinstance(first, str) and isinstance(second, str):
        return first + separator + second if first else second
    return [*_parts(first), {"type": "text", "text": separator}, *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
