"""The names of vLLM that a module imports, and those of them that have no counterpart here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec

_TABLE = (".as_vllm.table", "quire")
"""Imported by name, from above: only code that was written for vLLM needs it."""
_MOST = 12
"""Names that a sentence lists."""


def missing_names(module: str) -> list[str]:
    """Names of vLLM that a source imports and Quire lacks, sorted; none if it is unreadable."""
    table = importlib.import_module(*_TABLE)
    names = set(_imported(module))
    return sorted(name for name in names if not _is_served(table, name))


def without_counterpart(module: str) -> str:
    """The end of a sentence about a module that was written for vLLM."""
    missing = missing_names(module)
    if not missing:
        return "the layers and configs of vLLM that it is made of have no counterpart"
    more = f" and {len(missing) - _MOST} more" if len(missing) > _MOST else ""
    verb = "has" if len(missing) == 1 else "have"
    return f"{', '.join(missing[:_MOST])}{more} {verb} no counterpart"


def _is_served(table: object, name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    if name in table.MODULES:  # type: ignore[attr-defined]
        return True
    home = table.names_of(module).get(attribute)  # type: ignore[attr-defined]
    return home is not None and home[0] != table.REFUSED  # type: ignore[attr-defined]


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(_parsed(module)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] == "vllm":
                yield from (f"{module}.{alias.name}" for alias in node.names)


def _parsed(module: str) -> ast.AST:
    try:
        spec = find_spec(module)
        read = getattr(spec and spec.loader, "get_source", lambda name: None)
        return ast.parse(read(module) or "")
    except (ImportError, ValueError, OSError, SyntaxError):
        return ast.Module([], [])
