"""Tables that several formats of calls share, made from their marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.server.output_parsing.state_table import (
    Head,
    Key,
    ParserState,
    Reads,
    key_alone,
    name_alone,
)
from quire.server.output_parsing.tool_schemas import TYPES, json_type_named


def tagged(opening: str, closing: str) -> Mapping[str, ParserState]:
    """One envelope between two tags, as often as there are calls."""
    tags = {closing: "content", opening: "call"}
    return {
        "content": ParserState(Reads.CONTENT, {opening: "call"}),
        "call": ParserState(Reads.ENVELOPE, tags, then="after"),
        "after": ParserState(Reads.CONTENT, tags),
    }


def listed(*openings: str, closing: str = "") -> dict[str, ParserState]:
    """A JSON list of envelopes after an opening."""
    opens = dict.fromkeys(openings, "list")
    after = {closing: "content"} if closing else {}
    return {
        "content": ParserState(Reads.CONTENT, opens),
        "list": ParserState(Reads.BLANK, {"[": "item"}),
        "item": ParserState(Reads.ENVELOPE, after, then="more"),
        "more": ParserState(Reads.CONTENT, {",": "item", "]": "after", **after}, then="content"),
        "after": ParserState(Reads.CONTENT, {**after, **opens}),
    }


def marked_parameters(
    section: str,
    section_end: str,
    call: str,
    name_end: str,
    key: str,
    key_end: str,
    call_end: str,
    value_end: str = "</parameter>",
    *,
    head: Callable[[str], Head | None] = name_alone,
    read_key: Callable[[str], Key] = key_alone,
    verbatim: tuple[str, str] | None = None,
) -> dict[str, ParserState]:
    """Calls whose arguments stand in tags of their own, within the tags of a section ("": there is
    none). A value may have these tags within its lines: its end is followed by another tag, and the
    tags of a value that was not closed begin a line.
    """
    sections = {section: "section"} if section else {}
    section_ends = (section_end,) if section_end else ()
    opens = {**sections, call: "name"}
    value_ends = {value_end: "between", f"\n{key}": "key", call_end: "close"}
    followers = {value_end: (key, call_end, *section_ends, call)}
    if section:
        followers[call_end] = (*section_ends, section, call)
    return {
        "content": ParserState(Reads.CONTENT, opens),
        "section": ParserState(Reads.BLANK, {call: "name"}),
        "name": ParserState(Reads.HEAD, {name_end: "between"}, head=head, bars="\n<"),
        "between": ParserState(
            Reads.CONTENT,
            {key: "key", call_end: "close", **dict.fromkeys(section_ends, "closed"), **opens},
        ),
        "key": ParserState(Reads.KEY, {key_end: "value"}, key=read_key),
        "value": ParserState(Reads.VALUE, value_ends, followers=followers, verbatim=verbatim),
        "close": ParserState(
            Reads.CONTENT, {**dict.fromkeys(section_ends, "content"), **opens}, closes=True
        ),
        "closed": ParserState(Reads.CONTENT, opens, closes=True),
    }


def argument_pairs(
    before: str = "<",
    after: str = ">",
    *,
    has_section: bool = False,
    separator: str = "",
    has_types: bool = False,
) -> dict[str, ParserState]:
    """Calls whose arguments are a tag with the key and one with the value: `<arg_key>`,
    `<arg_value>`. `before` and `after` stand around the name of each tag. With `has_section` calls
    are within `<tool_calls>`; `separator` is the tag after a call's name; `has_types`: a tag
    between key and value may have the type.
    """

    def tags(name: str) -> tuple[str, str]:
        return f"{before}{name}{after}", f"</{before[1:]}{name}{after}"

    (call, call_end), (section, section_end) = tags("tool_call"), tags("tool_calls")
    (key, key_end), (value, value_end) = tags("arg_key"), tags("arg_value")
    kind, kind_end = tags("arg_type")
    opens = {call: "name", **({section: "section"} if has_section else {})}
    after_calls = {section_end: "content"} if has_section else {}
    closes = {section_end: "closed"} if has_section else {}
    ends = {key: "between", call_end: "between"}
    name_ends = {tags(separator)[0]: "between"} if separator else {"\n": "between", key: "between"}
    types = {kind: "type"} if has_types else {}
    return {
        "content": ParserState(Reads.CONTENT, opens),
        "section": ParserState(Reads.BLANK, {call: "name"}),
        "name": ParserState(
            Reads.HEAD,
            {**name_ends, call_end: "between"},
            kept=set(ends) & {*name_ends, call_end},
            bars="<{",
        ),
        "between": ParserState(
            Reads.CONTENT, {key: "key", call_end: "close", call: "name", **closes}
        ),
        "key": ParserState(Reads.KEY, {key_end: "colon"}),
        "colon": ParserState(Reads.CONTENT, {value: "value", call_end: "close", **types}),
        "type": ParserState(Reads.KEY, {kind_end: "colon"}, key=type_alone),
        "value": ParserState(
            Reads.VALUE, {value_end: "between"}, followers={value_end: (key, call_end, call)}
        ),
        "close": ParserState(Reads.CONTENT, {**opens, **after_calls}, closes=True),
        "closed": ParserState(Reads.CONTENT, opens, closes=True),
    }


def type_alone(text: str) -> Key:
    """The type of the next value, where the tool's schema says none."""
    kind = json_type_named(text)
    return Key(None, frozenset({kind}) & TYPES)


def markup_before_a_call(text: str) -> Head:
    """The head of text that is markup if a call follows it, and else content."""
    return Head(is_held=True)


def deepseek_states(name: ParserState) -> Mapping[str, ParserState]:
    """Sections of calls, each with its `name` and then its arguments."""
    between = {"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"}
    return {
        "content": ParserState(Reads.CONTENT, {"<｜tool▁calls▁begin｜>": "section"}),
        "section": ParserState(Reads.BLANK, {"<｜tool▁call▁begin｜>": "name"}),
        "name": name,
        "arguments": ParserState(Reads.JSON, {"<｜tool▁call▁end｜>": "between"}, then="end"),
        "between": ParserState(Reads.CONTENT, between),
        "end": ParserState(
            Reads.CONTENT, {"```": "end", "<｜tool▁call▁end｜>": "between", **between}
        ),
    }
