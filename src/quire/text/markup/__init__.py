"""Answers of a model as nodes of a document: Markdown, coloured code and formulas.

The work is done by packages that `pip install 'quire[page]'` brings. A text may be hostile, so this
runs in a process with limits, and what comes out has only elements and attributes of a list.
"""

from __future__ import annotations

from importlib.util import find_spec

from quire.text.markup.drawing import Drawing, draw

PACKAGES = {
    "markdown_it": "markdown-it-py",
    "linkify_it": "linkify-it-py",
    "pygments": "Pygments",
    "latex2mathml": "latex2mathml",
    "nh3": "nh3",
}
"""Modules that are needed, and the names of their packages."""

MAX_MARKUP_CHARS = 2**18
"""Longest text that is drawn at once."""


def missing_packages() -> list[str]:
    """The packages that are not installed."""
    return [package for module, package in PACKAGES.items() if find_spec(module) is None]


__all__ = ["MAX_MARKUP_CHARS", "Drawing", "draw", "missing_packages"]
