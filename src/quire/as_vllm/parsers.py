"""vLLM's managers of tool and reasoning parsers, over the formats that Quire knows."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from quire.plugins import NameTable
from quire.server import output_parsing

_OWN = (
    "Formats are tables, registered by a plugin (docs/plugins.md): files of Python are not loaded."
)


class _Manager:
    """The formats of a table by name."""

    _table: ClassVar[NameTable[Any]]

    @classmethod
    def list_registered(cls) -> list[str]:
        """The names of all parsers."""
        return sorted(cls._table)

    @classmethod
    def register_module(
        cls, name: str | list[str] | None = None, force: bool = True, module: Any = None
    ) -> Any:
        """Register a format, under one name or several, or return what does so with the format that
        it gets. `force` replaces nothing: a name that is taken is refused.

        Raises TypeError for what is not a format (classes parse by themselves there), PluginError
        for a name that is taken.
        """
        if module is not None:
            return cls._register(name, module)

        def register(module: Any) -> Any:
            return cls._register(name, module)

        return register

    @classmethod
    def _register(cls, name: str | list[str] | None, module: Any) -> Any:
        names = [name] if isinstance(name, str) else name
        for each in names or [getattr(module, "name", "")]:
            cls._table.register(each, module)
        return module

    @classmethod
    def _import(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: files of Python are not loaded."""
        raise NotImplementedError(_OWN)

    @classmethod
    def _find(cls, name: str | None) -> str:
        """The name, if there is such a format. Raises KeyError."""
        if name is None or name not in cls._table:
            known = ", ".join(cls.list_registered())
            raise KeyError(f"There is no {cls._table.what} {name!r}: {known}.")
        return name


class ToolParserManager(_Manager):
    """The formats of tool calls by name."""

    _table = output_parsing.TOOL_PARSERS
    import_tool_parser = _Manager._import

    @classmethod
    def get_tool_parser(cls, name: str | None) -> Any:
        """The plan of a format, whose `read(text, tools=...)` gives content and calls, and whose
        `open(tools=...)` is fed a stream. Raises KeyError for a name that is not known.
        """
        return output_parsing.plan_parsers(cls._find(name), None)


class ReasoningParserManager(_Manager):
    """The formats of reasoning by name."""

    _table = output_parsing.REASONING_PARSERS
    import_reasoning_parser = _Manager._import

    @classmethod
    def get_reasoning_parser(cls, name: str | None) -> Any:
        """The plan of a format, as `ToolParserManager.get_tool_parser` gives it."""
        return output_parsing.plan_parsers(None, cls._find(name))
