"""HTML of an untrusted text as nodes, which a page makes without parsing HTML itself.

nh3 removes what is not in the list of elements and attributes. A node is a text, or `[name,
attributes, children]`.
"""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from typing import Any, TypeAlias

MAX_NODES = 100_000
MAX_DEPTH = 100

Node: TypeAlias = "str | list[Any]"

_VOID = frozenset({"br", "hr"})
_HOLDS_BLOCKS = frozenset(
    ("", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr"),
)
_TEXT = (
    *("p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li"),
    *("pre", "code", "em", "strong", "s", "a", "span"),
    *("table", "thead", "tbody", "tr", "th", "td"),
)
_MATH = (
    *("math", "mrow", "mi", "mo", "mn", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot"),
    *("msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts"),
    *("mtable", "mtr", "mtd", "mstyle", "mpadded", "mphantom", "menclose"),
)
_MATH_ATTRIBUTES = {
    *("display", "displaystyle", "scriptlevel", "stretchy", "fence", "form", "accent"),
    *("movablelimits", "minsize", "maxsize", "width", "height", "depth", "lspace", "voffset"),
    *("linethickness", "columnalign", "notation", "mathvariant"),
}
_ATTRIBUTES = {
    **dict.fromkeys(_MATH, _MATH_ATTRIBUTES),
    "a": {"href"},
    "ol": {"start"},
    "pre": {"lang"},
    "th": {"align"},
    "td": {"align"},
}


class TooManyNodes(Exception):
    """A text whose nodes would take a browser too long."""


def nodes_of(html: str, classes: frozenset[str], most: int = MAX_NODES) -> tuple[list[Node], int]:
    """The nodes of a piece of HTML, and how many there are; `classes`: those that a `span` may
    have. Raises TooManyNodes for more than `most`.
    """
    tree = _Tree(most)
    tree.feed(_cleaner(classes).clean(html))
    tree.close()
    return tree.nodes, tree.num


@cache
def _cleaner(classes: frozenset[str]) -> Any:
    import nh3

    return nh3.Cleaner(
        tags={*_TEXT, *_MATH},
        # by default every element may have `lang` and `title`
        attributes={**_ATTRIBUTES, "*": set()},
        allowed_classes={"span": set(classes)},
        url_schemes={"http", "https", "mailto"},
        # a relative address would lead into this server
        url_relative="deny",
        link_rel=None,
    )


class _Tree(HTMLParser):
    """Makes nodes of HTML that nh3 has written."""

    def __init__(self, most: int) -> None:
        super().__init__(convert_charrefs=True)
        self.nodes: list[Node] = []
        self.num = 0
        self._most = most
        self._open: list[tuple[str, list[Node]]] = [("", self.nodes)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._count()
        children: list[Node] = []
        given = {name: value or "" for name, value in attrs}
        self._open[-1][1].append([tag, given, children])
        if tag not in _VOID:
            self._open.append((tag, children))
            if len(self._open) > MAX_DEPTH:
                raise TooManyNodes

    def handle_endtag(self, tag: str) -> None:
        if len(self._open) > 1 and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open[-1][0] in _HOLDS_BLOCKS and "\n" in data and data.isspace():
            return  # a line end between two blocks
        self._count()
        self._open[-1][1].append(data)

    def _count(self) -> None:
        self.num += 1
        if self.num > self._most:
            raise TooManyNodes
