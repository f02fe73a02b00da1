"""Tools that a server would run itself, such as web search. This server runs none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HOSTED = (
    *("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution"),
    *("image_generation", "mcp", "tool_search"),
)
"""Beginnings of their types, which have dates after them."""


def without_hosted(tools: Sequence[Any] | None, choice: Any) -> tuple[list[Any] | None, list[str]]:
    """The tools that the caller runs (None without any), and the places of those that are left out,
    `tools[1]` for example. Where a call is forced, all stay, to be refused by name.
    """
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", choice)
    # a forced call of a tool that is left out could not be made
    if kind not in (None, "auto", "none"):
        return list(tools) if tools else None, []
    kept, left_out = [], []
    for index, tool in enumerate(tools or ()):
        if is_hosted(tool):
            left_out.append(f"tools[{index}]")
        else:
            kept.append(tool)
    return kept or None, left_out


def is_hosted(tool: Any) -> bool:
    """Whether the server would have to run a tool."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return isinstance(kind, str) and kind.startswith(_HOSTED)
