"""LaTeX in Markdown: formulas and their MathML, or their text where it cannot be drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

MAX_FORMULA_CHARS = 4000
MAX_FORMULA_LINES = 200

UNFINISHED = "unfinished"
"""Key in the environment of a parse: the text goes on, so that a formula may still be closed."""

_PAIRS = ((r"\(", r"\)", False), (r"\[", r"\]", True), ("$$", "$$", True))
# A single sign is an amount of money as often as a formula: the rule is Pandoc's.
_DOLLARS = re.compile(r"\$(?![\s$])((?:[^$\\]|\\.)*?(?:[^$\\\s]|\\.))\$(?![\d$])", re.DOTALL)
_BLOCK_START = re.compile(r"\\\[|\$\$|\\begin\{(equation|align|gather|split)(\*?)\}")

_RENAMED = (
    (re.compile(r"\\(begin|end)\{aligned\}"), r"\\\1{split}"),
    (re.compile(r"\\(begin|end)\{(?:gathered|gather\*?)\}"), r"\\\1{matrix}"),
    (re.compile(r"\\(begin|end)\{dcases\}"), r"\\\1{cases}"),
    (re.compile(r"\\(begin|end)\{equation\*?\}|\\(?:nonumber|notag)\b|\\label\{[^{}]*\}"), ""),
)
"""Equivalents, for the converter, of what it does not know."""

# Traces of what the converter has passed through: unknown commands, columns and line ends outside
# of a table, and signs around a part that browsers do not draw.
_NOT_CONVERTED = re.compile(
    r"<m[io]>(?:\\|&</)|linebreak=|<menclose notation=\"(?!box\")|<mtext>[^<]*[\\$]"
)


def add_formulas(markdown: MarkdownIt) -> None:
    r"""Have `markdown` find `\(...\)`, `$...$`; on own lines `\[...\]`, `$$...$$`, environments."""
    interrupted = ["paragraph", "reference", "blockquote", "list"]
    markdown.block.ruler.before("fence", "formula", _find_block, {"alt": interrupted})
    markdown.inline.ruler.before("escape", "formula", _find_inline)
    markdown.add_render_rule("formula", _render)
    markdown.add_render_rule("formula_block", _render)


def _find_inline(state: StateInline, silent: bool) -> bool:
    found = _inline_at(state.src, state.pos, state.posMax)
    if found is None:
        return False
    latex, end, is_display = found
    if not silent:
        token = state.push("formula", "math", 0)
        token.content = latex
        token.markup = state.src[state.pos : end]
        token.info = "display" if is_display else ""
    state.pos = end
    return True


def _inline_at(text: str, start: int, limit: int) -> tuple[str, int, bool] | None:
    """The formula that begins at `start`, its end, and whether it is set apart."""
    if text[start] not in "\\$":
        return None
    for opening, closing, is_display in _PAIRS:
        if text.startswith(opening, start, limit):
            begin = start + len(opening)
            # bounded: many openings without an end would each look through all that follows
            end = text.find(closing, begin, min(limit, begin + MAX_FORMULA_CHARS))
            if end <= begin or not text[begin:end].strip():
                return None
            return text[begin:end], end + len(closing), is_display
    # bounded as above; the last of three more is what may not follow
    match = _DOLLARS.match(text, start, min(limit, start + MAX_FORMULA_CHARS + 3))
    if match is None or len(match[1]) > MAX_FORMULA_CHARS:
        return None
    return match[1], match.end(), False


def _find_block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    if state.is_code_block(first):
        return False
    begin = state.bMarks[first] + state.tShift[first]
    opening = _BLOCK_START.match(state.src, begin, state.eMarks[first])
    if opening is None:
        return False
    closing = {r"\[": r"\]", "$$": "$$"}.get(opening[0], opening[0].replace("begin", "end"))
    line, where = _closing_line(state, first, last, opening.end(), closing)
    if where is None:
        if not state.env.get(UNFINISHED) or last - first > MAX_FORMULA_LINES:
            return False
        line = last - 1
    if silent:
        return True
    token = state.push("formula_block", "math", 0)
    token.block = True
    token.map = [first, line + 1]
    token.info = "display"
    if where is not None:
        whole = state.getLines(first, line + 1, state.blkIndent, False).strip()
        token.markup = whole
        token.content = whole if "begin" in opening[0] else whole[2:-2]
    state.line = line + 1
    return True


def _closing_line(
    state: StateBlock, first: int, last: int, begin: int, closing: str
) -> tuple[int, int | None]:
    """The line that `closing` ends, and where; None without one in this block."""
    for line in range(first, min(last, first + MAX_FORMULA_LINES)):
        if line > first:
            # the list item in which the formula begins has ended
            if not state.isEmpty(line) and state.sCount[line] < state.blkIndent:
                break
            begin = state.bMarks[line]
        where = state.src.find(closing, begin, state.eMarks[line])
        if where >= 0:
            is_end = not state.src[where + len(closing) : state.eMarks[line]].strip()
            return line, where if is_end else None
    return first, None


def _render(renderer: object, tokens: Sequence[Token], index: int, *_: Any) -> str:
    token = tokens[index]
    is_display = bool(token.info)
    drawn = mathml(token.content, is_display=is_display)
    if drawn is not None:
        return f"<p>{drawn}</p>" if token.block else drawn
    source = escape(token.markup)
    return f"<pre><code>{source}</code></pre>" if token.block else f"<code>{source}</code>"


def mathml(latex: str, *, is_display: bool) -> str | None:
    """A formula as MathML; None for one that cannot be drawn as it is meant."""
    from latex2mathml.converter import convert

    if len(latex) > MAX_FORMULA_CHARS:
        return None
    for pattern, replacement in _RENAMED:
        latex = pattern.sub(replacement, latex)
    try:
        drawn: str = convert(latex, display="block" if is_display else "inline")
    except MemoryError:
        raise
    except Exception:  # it has a class of its own for every slip, and IndexError for others
        return None
    return None if _NOT_CONVERTED.search(drawn) else drawn
