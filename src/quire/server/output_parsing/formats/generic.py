"""The format of calls for models whose chat template shows no tools: JSON objects, in tags, in a
Markdown fence or bare.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.server.output_parsing.state_table import ParserState, Reads, ToolFormat


def enveloped(kind: str, closing: str = "") -> dict[str, ParserState]:
    """One envelope, several, or a list of them, up to a closing tag; the states' names begin with
    `kind`.
    """
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
