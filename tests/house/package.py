"""The package's modules, read and parsed once for all rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "quire"


class Module:
    """One file: `name` as it is imported, `place` relative to the package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = path.relative_to(SOURCE).as_posix()
        parts = ("quire", *path.relative_to(SOURCE).with_suffix("").parts)
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.text = path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> set[str]:
        """What of quire it imports, type-only and local imports included, and imports by string
        (`importlib.import_module("quire.x")`, `"quire.x:name"`). A name imported from a module
        stands as that module; a submodule imported from a package as the submodule.
        """
        return {home for home in self._homes() if home and home != self.name}

    def _homes(self) -> Iterator[str | None]:
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                yield from (home_of(f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (home_of(alias.name) for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                module = node.value.partition(":")[0]
                yield module if module in NAMES and module != "quire" else None


MODULES = [Module(path) for path in sorted(SOURCE.rglob("*.py"))]
NAMES = {module.name for module in MODULES}


def home_of(dotted: str) -> str | None:
    """The module that `dotted`, a module or a name in one, is found in; None if it is not ours."""
    while dotted and dotted not in NAMES:
        dotted = dotted.rpartition(".")[0]
    return dotted or None
