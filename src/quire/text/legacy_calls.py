"""Messages with `function_call` and the role "function", which came before tools in OpenAI's API,
made into messages with `tool_calls` and the role "tool".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_tool_calls(messages: Sequence[Any]) -> list[Any]:
    """The messages with each function call as a tool call of its own id, which its result has too.

    Messages of another form are passed on as they are, malformed ones included.
    """
    made: list[Any] = []
    num_calls = 0
    for message in messages:
        if isinstance(message, Mapping) and message.get("function_call") is not None:
            num_calls += 1
            message = _with_tool_call(message, _id(num_calls))
        elif isinstance(message, Mapping) and message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": _id(max(1, num_calls))}
        made.append(message)
    return made


def _with_tool_call(message: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": message["function_call"]}
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return {**rest, "tool_calls": [*(message.get("tool_calls") or ()), call]}


def _id(number: int) -> str:
    """Nine letters and digits: some chat templates take no other id."""
    return f"call{number:05d}"
