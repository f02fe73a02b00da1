"""Arguments as elements that may hold others, each tag after a mark, as MiniMax M3 writes them:
`]<]minimax[>[<days>2]<]minimax[>[</days>`. The items of a list are elements called `item`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from quire.server.output_parsing.delimiters import NON_BLANK, Delimiters
from quire.server.output_parsing.ends import End, Outcome
from quire.server.output_parsing.formats.parameters_as_text import Parameters, typed_json
from quire.server.output_parsing.json_string import within_quotes
from quire.server.output_parsing.state_table import Key, ParserState
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS, Writer

ITEM = "item"
TEXT_KEY = "$text"
"""The key of text that stands between the elements of an object."""
MAX_DEPTH = 64
"""Levels of elements within others; a deeper tag is text."""


@dataclass(slots=True)
class Element:
    """One element: its text as far as it came, and the elements within."""

    name: str
    text: list[str] = field(default_factory=list)
    children: list[Element] = field(default_factory=list)


class Elements:
    """Reads elements up to a delimiter: text as it comes, other arguments when complete."""

    __slots__ = ("_is_stray", "_is_text", "_marks", "_open", "_parameters", "_state", "_tag",
                 "_written")  # fmt: skip

    def __init__(self, state: ParserState, parameters: Parameters) -> None:
        self._state = state
        self._parameters = parameters
        self._marks = Delimiters((state.mark,))
        self._tag = re.compile(rf"{re.escape(state.mark)}<(/?)([^<>/]{{1,{MAX_HEAD_CHARS}}})>")
        self._open: list[Element] = []
        self._written: list[str] = []
        self._is_text = self._is_stray = False

    def read(self, text: str, start: int, out: Writer) -> tuple[int, Outcome]:
        """Read up to a delimiter; an element that was not closed before it ends there."""
        while True:
            end, mark = self._marks.find(text, start)
            self._take(text[start:end], out)
            if mark is None:
                return end, End.MORE
            found = self._tag.match(text, end)
            if found is None:
                rest = text[end + len(mark) :]
                # the rest of a tag may still come
                if len(rest) <= MAX_HEAD_CHARS and ">" not in rest:
                    return end, End.MORE
                self._take(mark, out)
                start = end + len(mark)
            elif self._is_open(found) or found[0] not in self._state.delimiters:
                self._take_tag(found, out)
                start = found.end()
            else:
                while self._open:
                    self._close(out)
                self._parameters.close(out)
                return end, found[0]

    def finish(self, rest: str, out: Writer) -> None:
        """The output ended here: an argument that was cut short is written as far as it came."""
        if self._is_text:
            self._take(rest, out)
        elif self._open:
            out.arguments("".join(self._written) + rest)

    def _is_open(self, tag: re.Match[str]) -> bool:
        return bool(tag[1] and self._open and self._open[-1].name == tag[2])

    def _take(self, text: str, out: Writer) -> None:
        if self._is_text:
            out.arguments(within_quotes(text))
        elif self._open:
            self._open[-1].text.append(text)
            self._written.append(text)
        elif text:
            if not self._is_stray:  # blanks between tags are markup, as those between calls
                self._is_stray = out.touches_call = True
            out.content(text)

    def _take_tag(self, tag: re.Match[str], out: Writer) -> None:
        if self._is_open(tag):
            self._close(out)
        elif self._is_text or tag[1] or len(self._open) == MAX_DEPTH:
            self._take(tag[0], out)
        else:
            if self._open:
                self._written.append(tag[0])
            else:
                self._begin(tag[2], out)
            self._open.append(Element(tag[2]))

    def _begin(self, name: str, out: Writer) -> None:
        self._is_stray = False
        self._parameters.expect(Key(name))
        self._parameters.write_key(out)
        # only then is it known, before the end, how the value is written
        self._is_text = self._parameters.types(out) == {"string"}
        out.arguments(': "' if self._is_text else ": ")

    def _close(self, out: Writer) -> None:
        """The innermost element is complete."""
        element = self._open.pop()
        if self._open:
            self._open[-1].children.append(element)
            return
        out.arguments('"' if self._is_text else self._json(element, (), out))
        self._written.clear()
        self._is_text = False

    def _json(self, element: Element, path: tuple[str, ...], out: Writer) -> str:
        """The JSON of an element's value, which is at `path` within its argument."""
        types = self._parameters.types(out, *path)
        text = "".join(element.text)
        if not element.children:
            if types and "string" not in types and NON_BLANK.search(text) is None:
                empty = {"array": "[]", "object": "{}"}
                return next((empty[kind] for kind in empty if kind in types), '""')
            return typed_json(text, types or frozenset({"string"}), False)
        values = [
            (child.name, self._json(child, (*path, child.name), out)) for child in element.children
        ]
        is_list = all(name == ITEM for name, _ in values) and "object" not in types
        if "array" in types or is_list:
            return f"[{', '.join(value for _, value in values)}]"
        if NON_BLANK.search(text) is not None:
            values.append((TEXT_KEY, json.dumps(text, ensure_ascii=False)))
        return _object(values)


def _object(values: list[tuple[str, str]]) -> str:
    """An object; what has one name several times is a list."""
    by_name: dict[str, list[str]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    members = [
        f"{json.dumps(name, ensure_ascii=False)}: "
        f"{found[0] if len(found) == 1 else '[' + ', '.join(found) + ']'}"
        for name, found in by_name.items()
    ]
    return f"{{{', '.join(members)}}}"
