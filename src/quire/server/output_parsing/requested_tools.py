"""The tools of a request, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidParameter
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS

MAX_TOOLS = 512


def check_tools(tools: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """The tools, if each is a function with a name of its own and a schema of an object.

    Raises InvalidParameter that names the tool and what is wrong with it.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", len(tools), f"there may be at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        _check_tool(f"tools[{index}]", tool)
    names = names_of(tools)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InvalidParameter("tools", repeated[0], "each tool must have a name of its own")
    return tuple(tools)


def _check_tool(place: str, tool: Any) -> None:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        hint = "Other tools than functions are for the caller to run."
        raise InvalidParameter(f"{place}.type", kind, 'it must be "function"', hint)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter(f"{place}.function", function, "it must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_HEAD_CHARS:
        allowed = f"it must be a text of 1 to {MAX_HEAD_CHARS} characters"
        raise InvalidParameter(f"{place}.function.name", name, allowed)
    schema = function.get("parameters")
    if schema is not None and not (
        isinstance(schema, Mapping) and schema.get("type", "object") == "object"
    ):
        allowed = 'it must be a JSON schema of type "object"'
        raise InvalidParameter(f"{place}.function.parameters", schema, allowed)


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a checked tool."""
    name: str = tool["function"]["name"]
    return name


def names_of(tools: Sequence[Any]) -> list[str]:
    """The names of checked tools."""
    return [name_of(tool) for tool in tools]
