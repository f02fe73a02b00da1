"""The finished blocks of an answer as nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from quire.text.markup.code_shape import is_code
from quire.text.markup.formulas import UNFINISHED, add_formulas
from quire.text.markup.nodes import MAX_NODES, Node, TooManyNodes, nodes_of

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

MAX_COLOURED_CHARS = 2**16
"""Longest piece of code that is coloured."""


class Drawing(msgspec.Struct):
    """The beginning of a text, as far as nothing that follows can change it.

    `num_lines`: how many lines of the text that is. `is_code`: the text seems to be a program
    without fences, and is better shown as it is. `has_references`: there are links whose targets
    are elsewhere in the text, which are complete only in a text that is drawn as a whole.
    """

    nodes: list[Node]
    num_lines: int
    is_code: bool = False
    has_references: bool = False


def draw(text: str, *, is_whole: bool) -> Drawing:
    """Draw the blocks that are finished, or if the text `is_whole` all of it."""
    if is_code(text):
        return Drawing([], 0, is_code=True)
    lines = text.split("\n")
    environment: dict[str, Any] = {UNFINISHED: not is_whole}
    markdown = _markdown()
    if not is_whole:
        # The last line may be half a line, which its other half makes a part of the block before.
        starts = [first for first, _ in _blocks(_block_tokens("\n".join(lines[:-1]), environment))]
        lines = lines[: starts[-1]] if starts else []
        # anew: definitions in what is left out are not in the text that is drawn
        environment = {}
    tokens = markdown.parse("\n".join(lines), environment)
    nodes: list[Node] = []
    room = MAX_NODES
    for block in _blocks_of(tokens):
        drawn, num = _drawn(block, lines, room)
        nodes += drawn
        room -= num
    has_references = bool(environment.get("references"))
    return Drawing(nodes, len(lines), has_references=has_references)


def _block_tokens(text: str, environment: dict[str, Any]) -> list[Token]:
    tokens: list[Token] = []
    markdown = _markdown()
    markdown.block.parse(text, markdown, environment, tokens)
    return tokens


def _blocks(tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """First and last line of every block of the text itself."""
    for token in tokens:
        if token.level == 0 and token.nesting >= 0 and token.map:
            yield token.map[0], token.map[1]


def _blocks_of(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    start = 0
    for index, token in enumerate(tokens):
        if token.level == 0 and token.nesting <= 0:
            yield tokens[start : index + 1]
            start = index + 1


def _drawn(block: Sequence[Token], lines: Sequence[str], room: int) -> tuple[list[Node], int]:
    """The nodes of one block and their number, or its text where they are too many or too deep."""
    markdown = _markdown()
    try:
        html = markdown.renderer.render(block, markdown.options, {})
        return nodes_of(html, _code_classes(), room)
    except (TooManyNodes, RecursionError):
        first, last = block[0].map or (0, 0)
        return [["pre", {}, ["\n".join(lines[first:last])]]], 0


@cache
def _markdown() -> MarkdownIt:
    from markdown_it import MarkdownIt

    options = {"html": False, "linkify": True, "breaks": True, "highlight": _coloured}
    markdown = MarkdownIt("js-default", options)
    assert markdown.linkify is not None, "missing_packages() has been asked"
    markdown.linkify.set({"fuzzy_link": False, "fuzzy_email": False})
    # The server links nothing that a page would load: an image is a link to it.
    markdown.add_render_rule("image", _render_image)
    markdown.add_render_rule("fence", _render_fence)
    markdown.add_render_rule("th_open", _render_cell)
    markdown.add_render_rule("td_open", _render_cell)
    add_formulas(markdown)
    return markdown


def _render_image(renderer: Any, tokens: Sequence[Token], index: int, *rest: Any) -> str:
    token = tokens[index]
    address = str(token.attrs.get("src", ""))
    return f'<a href="{escape(address)}">{escape(token.content or address)}</a>'


def _render_fence(renderer: Any, tokens: Sequence[Token], index: int, *rest: Any) -> str:
    token = tokens[index]
    language = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
    code = _coloured(token.content.removesuffix("\n"), language, "")
    return f'<pre lang="{escape(language)}"><code>{code}</code></pre>'


def _render_cell(renderer: Any, tokens: Sequence[Token], index: int, *rest: Any) -> str:
    token = tokens[index]
    side = str(token.attrs.get("style", "")).removeprefix("text-align:")
    return f'<{token.tag} align="{escape(side)}">' if side else f"<{token.tag}>"


def _coloured(code: str, language: str, _: str) -> str:
    """Code as HTML, its parts in spans by their kind where the language is known."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    if not language or len(code) > MAX_COLOURED_CHARS:
        return escape(code)
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return escape(code)
    html: str = highlight(code, lexer, HtmlFormatter(nowrap=True))
    return html if code.endswith("\n") else html.removesuffix("\n")


@cache
def _code_classes() -> frozenset[str]:
    from pygments.token import STANDARD_TYPES

    return frozenset(name for name in STANDARD_TYPES.values() if name)
