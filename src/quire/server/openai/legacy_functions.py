"""`functions` and `function_call`, the fields that were before `tools` and `tool_choice`.

A request with them is served as one with tools that makes one call at most. Messages of that form
are translated by `quire.text.legacy_calls`.
"""

from __future__ import annotations

from typing import Any

from quire.errors import InvalidParameter
from quire.server.openai.requests import ChatRequest


def is_legacy(body: ChatRequest) -> bool:
    """Whether the request gives functions, so that its reply has `function_call`."""
    return body.functions is not None or body.function_call is not None


def tools_and_choice(body: ChatRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """The tools of a request and its choice among them, from the fields of either form.

    Raises InvalidParameter where both are given, or a choice that the older form does not have.
    """
    if not is_legacy(body):
        return body.tools, body.tool_choice
    # two forms of the reply would be right
    if body.tools or body.tool_choice is not None:
        allowed = "functions and function_call do not go with tools and tool_choice"
        raise InvalidParameter("functions", body.functions, allowed, "Send tools alone.")
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    choice = body.function_call
    if isinstance(choice, dict):
        if not isinstance(choice.get("name"), str):
            allowed = "it must be none, auto or an object with the name of a function"
            raise InvalidParameter("function_call", choice, allowed)
        choice = {"type": "function", "function": choice}
    return tools, choice
