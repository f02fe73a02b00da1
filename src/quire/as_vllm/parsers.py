"""vLLM's managers of tool and reasoning parsers, over the formats that Quire knows."""

from __future__ import annotations

from typing import Any, NoReturn

from quire.server import output_parsing

_OWN = "Formats are described in docs/tools_and_reasoning.md; classes of a program are not taken."


class ToolParserManager:
    """The formats of tool calls by name."""

    @classmethod
    def list_registered(cls) -> list[str]:
        """Their names."""
        return sorted(output_parsing.TOOL_PARSERS)

    @classmethod
    def get_tool_parser(cls, name: str | None) -> Any:
        """The plan of a format, whose `read(text, tools=...)` gives content and calls, and whose
        `open(tools=...)` is fed a stream. Raises KeyError for a name that is not known.
        """
        if name not in output_parsing.TOOL_PARSERS:
            raise KeyError(f"There is no tool parser {name!r}: {', '.join(cls.list_registered())}.")
        return output_parsing.plan_parsers(name, None)

    @classmethod
    def register_module(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise NotImplementedError(_OWN)

    import_tool_parser = register_module


class ReasoningParserManager:
    """The formats of reasoning by name."""

    @classmethod
    def list_registered(cls) -> list[str]:
        """Their names."""
        return sorted(output_parsing.REASONING_PARSERS)

    @classmethod
    def get_reasoning_parser(cls, name: str | None) -> Any:
        """The plan of a format, as `ToolParserManager.get_tool_parser` gives it."""
        if name not in output_parsing.REASONING_PARSERS:
            known = ", ".join(cls.list_registered())
            raise KeyError(f"There is no reasoning parser {name!r}: {known}.")
        return output_parsing.plan_parsers(None, name)

    @classmethod
    def register_module(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise NotImplementedError(_OWN)

    import_reasoning_parser = register_module
