"""The formats of every model: that of calls where the chat template shows no tools (JSON objects,
in tags, in a Markdown fence or bare), and those of calls that a grammar forces.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.server.output_parsing.formats.call_tables import listed
from quire.server.output_parsing.state_table import ParserState, Reads, ToolFormat


def enveloped(kind: str, closing: str = "") -> dict[str, ParserState]:
    """One envelope or several, or a list, up to a closing tag; states' names begin with `kind`."""
    one, item, more = f"{kind} object", f"{kind} item", f"{kind} more"
    ends = {closing: "content"} if closing else {}
    return {
        kind: ParserState(Reads.BLANK, {"{": one, "[": item}, kept={"{"}),
        one: ParserState(Reads.ENVELOPE, ends, then=more),
        more: ParserState(
            Reads.CONTENT, {"{": one, ",": one, ";": one, **ends}, then="content", kept={"{"}
        ),
        item: ParserState(Reads.ENVELOPE, ends, then=f"{kind} list"),
        f"{kind} list": ParserState(Reads.CONTENT, {",": item, "]": more, **ends}, then="content"),
    }


def generic_states() -> Mapping[str, ParserState]:
    """Envelopes in tags, in a Markdown fence, or bare at the start of the answer or of a line."""
    marked = dict.fromkeys(("```json", "```tool_call", "```\n"), "fenced")
    marked["<tool_call>"] = "tagged"
    bare = {"{": "bare object", "[": "bare item"}
    return {
        "start": ParserState(Reads.BLANK, {**bare, **marked}, then="content", kept={"{"}),
        "content": ParserState(
            Reads.CONTENT, {"\n{": "bare object", "\n[": "bare item", **marked}, kept={"\n{"}
        ),
        **enveloped("tagged", "</tool_call>"),
        **enveloped("fenced", "```"),
        **enveloped("bare"),
    }


GENERIC = ToolFormat(
    "generic",
    generic_states(),
    start="start",
    other_keys=frozenset({"type", "id"}),
    lone_names=False,
    only_known_names=True,
    # its marks are braces and fences, which a reasoning has as text
    ends_reasoning=False,
)
"""Format for models whose chat template knows no tools: the form that `quire.text.chat_tools` asks
for, and others that models write instead of it.
"""
PLAIN = ToolFormat("plain", {"content": ParserState(Reads.CONTENT)})


def required_calls() -> ToolFormat:
    """The format of a grammar for `tool_choice="required"`: a list of `{"name", "parameters"}`."""
    states = listed()
    return ToolFormat(
        "required", {**states, "start": ParserState(Reads.BLANK, {"[": "item"}, then="content")},
        start="start",
    )  # fmt: skip


def named_call(name: str, *, as_text: bool = False) -> ToolFormat:
    """The format of a grammar for a named `tool_choice`: the arguments and nothing else, as one
    JSON value, or as text that is the input of a custom tool.
    """
    reads = Reads.TEXT if as_text else Reads.JSON
    states = {
        "content": ParserState(Reads.CONTENT),
        "start": ParserState(reads, then="content", calls=name),
    }
    return ToolFormat("named", states, start="start")
