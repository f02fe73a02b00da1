"""Parsing of a model's outputs in a server: one tool format and one reasoning format, joined."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.server.output_parsing.answer_or_calls import free_text
from quire.server.output_parsing.call_ids import CallId
from quire.server.output_parsing.events import ParsedOutput, whole
from quire.server.output_parsing.formats.generic import GENERIC, PLAIN, named_call, required_calls
from quire.server.output_parsing.output_parser import OutputParser, Table
from quire.server.output_parsing.state_table import (
    FLOWING,
    ParserState,
    Reads,
    ReasoningFormat,
    ToolFormat,
)
from quire.server.output_parsing.tool_schemas import ToolSchemas

ASSUMED = "assumed"
"""The place inside a reasoning that nothing in the prompt has opened."""
ANSWER = "answer"
"""The place after the reasoning: where the answer of the table in use begins."""
PROMPT_END_CHARS = 256
"""Number of characters of the prompt's end that can say where the output begins."""


@dataclass(frozen=True, slots=True)
class FormStart:
    """A form begins after one of `ends`, in an output that opens with one of `opens`, and with any
    other output; without `opens`, after one of `ends` in every output.
    """

    opens: tuple[str, ...]
    ends: tuple[str, ...]


class ParserPlan:
    """Decisions made once for a model; each output then gets its own parser.

    `is_needed`: the model has a format of its own, so that every output has to be parsed.
    `tools_as_text`: prompts describe tools in the generic form; None: if the chat template reads no
    `tools`. Raises ValueError if
    the two formats do not go together.
    """

    def __init__(
        self, tool_format: ToolFormat | None = None, reasoning: ReasoningFormat | None = None
    ) -> None:
        self.tool_format = tool_format
        self.reasoning = reasoning
        is_generic = tool_format is GENERIC
        self.tools_as_text = None if tool_format is None else is_generic
        has_own_calls = tool_format is not None and not is_generic
        self.is_needed = has_own_calls or reasoning is not None
        self._plain = joined(None, reasoning)
        self._with_tools = joined(tool_format, reasoning)

    @property
    def described(self) -> str:
        tools = "none" if self.tool_format is None else self.tool_format.name
        reasoning = "none" if self.reasoning is None else self.reasoning.name
        return f"tool parser: {tools}, reasoning parser: {reasoning}"

    def delimiters(self, *, reads_calls: bool = True) -> frozenset[str]:
        """Every text that the formats look for, with or without those of calls."""
        states = (self._with_tools if reads_calls else self._plain).states.values()
        found = frozenset(text for state in states for text in state.texts)
        if self.reasoning is None or not self.reasoning.stays_in_answer:
            return found
        return found.union(self.reasoning.starts, self.reasoning.ends)

    def needs_special_tokens(
        self, special_tokens: Collection[str], *, reads_calls: bool = True
    ) -> bool:
        """Whether outputs need `skip_special_tokens=False`: a delimiter has a special token."""
        delimiters = self.delimiters(reads_calls=reads_calls)
        return any(
            token in delimiter for delimiter in delimiters for token in special_tokens if token
        )

    @property
    def writes_forced_calls_itself(self) -> bool:
        """Whether a required or named call is written in the model's own form: then `forced_calls`
        says which, and `forced` may not be given to `open`.
        """
        return self._with_tools.format.has_reasoning

    def place(self, prompt: str, continued: str = "") -> str:
        """State in which an output begins, by the text of its prompt.

        A chat template that opens or closes the reasoning does so at the very end; delimiters
        before the end may be text of a message. `continued` is the text of the message that the
        output goes on with, which the prompt then ends with.
        """
        if self.reasoning is None:
            return "content" if continued.strip() else ANSWER
        # the last occurrence: the message that is continued may have been said before
        before = prompt.rpartition(continued.strip())[0] if continued.strip() else prompt
        place = self._place(before[-PROMPT_END_CHARS:].rstrip())
        if not continued.strip():
            return place
        # the message may have a reasoning that is still open, which only parsing it shows
        parser = self.open(place)
        parser.feed(continued)
        return parser.place if parser.state.reads in FLOWING else "content"

    def _place(self, prompt_end: str) -> str:
        reasoning = self.reasoning
        if reasoning is None:
            return ANSWER
        if reasoning.table is not None:
            if prompt_end.endswith(reasoning.starts):
                return "reasoning"
            is_open = bool(reasoning.answer_starts) and prompt_end.endswith(reasoning.answer_starts)
            return "content" if is_open else "start"
        labelled = [start + reasoning.label for start in reasoning.starts]
        # templates differ in the line ends that they put after a delimiter
        if prompt_end.endswith(tuple(text.rstrip() for text in (*reasoning.starts, *labelled))):
            return "again"
        if prompt_end.endswith(tuple(text.strip() for text in reasoning.ends)):
            return ANSWER
        return ASSUMED if reasoning.is_assumed else "before"

    def place_of_form(self, place: str) -> str:
        """The place where an output with a form begins, if it would begin at `place` without one. A
        reasoning is not assumed, since the form lets the output open one or answer.
        """
        return "before" if place == ASSUMED else place

    def form_start(self, place: str) -> FormStart | None:
        """The start of the form in an output that begins at `place`; None: it begins there, too.

        The formats of whole outputs, which have a table, describe that themselves.
        """
        reasoning = self.reasoning
        if reasoning is None or reasoning.table is not None or place in (ANSWER, "content"):
            return None
        opens = reasoning.starts if place in ("before", ASSUMED) else ()
        return FormStart(opens, reasoning.ends)

    @property
    def describes_whole_outputs(self) -> bool:
        """Whether outputs are messages with headers, so that a form is a part of one."""
        return self.reasoning is not None and self.reasoning.output_of is not None

    def answer_format(self, form: Mapping[str, Any]) -> Mapping[str, Any]:
        """The format of the answer of a whole output: its header, and then a form."""
        assert self.reasoning is not None
        header = {"type": "const_string", "value": self.reasoning.answer_starts[0]}
        return {"type": "sequence", "elements": [header, form]}

    @property
    def may_begin_a_call(self) -> bool:
        """Whether the beginning of a whole output can tell that it is a call."""
        return self.reasoning is not None and bool(self.reasoning.begins_call)

    def begun_call(self, control_tokens: Collection[str]) -> Mapping[str, Any]:
        """The format of the rest of a whole output that begins as a call and is free from there."""
        assert self.reasoning is not None
        header = {"type": "const_string", "value": self.reasoning.begins_call}
        named = [text for text in control_tokens if text in "".join(self.delimiters())]
        free = {"type": "grammar", "grammar": free_text(named)}
        return {"type": "sequence", "elements": [header, free]}

    def whole_output(self, place: str, lasts: Sequence[Mapping[str, Any]]) -> str:
        """The structural tag of an output from `place` on that ends with one of the formats
        `lasts`, where the reasoning format describes whole outputs.
        """
        assert self.reasoning is not None and self.reasoning.output_of is not None
        output = self.reasoning.output_of(place, lasts)
        return json.dumps({"type": "structural_tag", "format": output})

    def open(
        self,
        place: str | None = None,
        *,
        tools: Sequence[Any] | None = None,
        forced: str | bool = False,
        writes_input: bool = False,
        max_calls: int | None = None,
        call_id: CallId | None = None,
        fills_answer: bool = False,
    ) -> OutputParser:
        """A parser of one output that begins at `place` (see there; None: after a prompt that does
        not say).

        `tools` are those of the request; None reads no calls. `forced`: a grammar made the output
        calls in the form of `tool_choice` "required" (True) or of the one named; `writes_input`: in
        that of a custom tool's input. More calls than
        `max_calls` are left out. `call_id` makes ids in place of the format's own. `fills_answer`:
        a reasoning that no answer follows is the answer.
        """
        table = self._table(tools, forced, writes_input)
        place = self._place("") if place is None else place
        lead = ""
        if self.reasoning is not None and self.reasoning.stays_in_answer:
            lead = self.reasoning.starts[0] if place in ("again", ASSUMED) else ""
            place = "content" if place == "content" else ANSWER
        if place == ANSWER:
            place = table.start
        # the model's own format also for forced calls: its template may refuse other ids
        maker = call_id or (self.tool_format or table.format).call_id
        schemas = ToolSchemas(tools or ())
        return OutputParser(table, place, schemas, maker, max_calls, lead, fills_answer)

    def _table(self, tools: Sequence[Any] | None, forced: str | bool, writes_input: bool) -> Table:
        if forced is False:
            return self._plain if tools is None else self._with_tools
        assert not self.writes_forced_calls_itself, "its grammar makes calls of its own form"
        if forced is True:
            return joined(required_calls(), self.reasoning)
        return joined(named_call(forced, as_text=writes_input), self.reasoning)

    def read(self, text: str, place: str | None = None, **options: Any) -> ParsedOutput:
        """A whole output at once, for a request that is not streamed; options as for `open`."""
        parser = self.open(place, **options)
        parsed = whole([*parser.feed(text), *parser.finish()])
        return replace(parsed, reasoning=None) if parser.is_filled else parsed


def joined(tool_format: ToolFormat | None, reasoning: ReasoningFormat | None) -> Table:
    """One table for both: before the answer there is the reasoning."""
    tools = tool_format or PLAIN
    if reasoning is None or reasoning.stays_in_answer:
        return Table(tools, tools.states, tool_format is not None)
    if reasoning.table is not None or tools.has_reasoning:
        return _joined_tables(tool_format, reasoning)
    states = {**tools.states, **reasoning_states(tools, reasoning)}
    return Table(tools, states, tool_format is not None, "opening" if reasoning.answer_tags else "")


def _joined_tables(tool_format: ToolFormat | None, reasoning: ReasoningFormat) -> Table:
    if reasoning.table is not None and tool_format is None:
        return Table(reasoning.table, reasoning.table.states, False)
    if reasoning.table is None or tool_format is None or not tool_format.has_reasoning:
        raise ValueError(
            f"Tool format {getattr(tool_format, 'name', None)!r} and reasoning format "
            f"{reasoning.name!r} do not go together: one of them describes whole outputs."
        )
    return Table(tool_format, tool_format.states, True)


def reasoning_states(tools: ToolFormat, reasoning: ReasoningFormat) -> Mapping[str, ParserState]:
    """The states before the answer. "before": the reasoning may begin, or end without having begun.
    "again": it has begun, and some models write its opening delimiter once more; "assumed" is the
    same, without evidence. "opening": the tag of an answer may come. "trimmed": blanks may.
    """
    openings = dict.fromkeys(reasoning.starts, "label" if reasoning.label else "reasoning")
    label = {reasoning.label: "reasoning"} if reasoning.label else {}
    tags = dict.fromkeys(reasoning.answer_tags, tools.start)
    content = tools.states["content"]
    closed = replace(content, delimiters={**dict.fromkeys(tags, "content"), **content.delimiters})
    closings = dict.fromkeys(reasoning.ends, "content")  # of nothing: a control token is not text
    reopened = replace(content, delimiters={**openings, **closings, **content.delimiters})
    tagged = {"opening": ParserState(Reads.LEAD, tags, then=tools.start), "content": closed}
    after = "opening" if tags else "trimmed" if reasoning.trims_answer else tools.start
    ends = dict.fromkeys(reasoning.ends, after)
    trimmed = {"trimmed": ParserState(Reads.CONTENT, then=tools.start, trims=True)}
    ends_at_calls = reasoning.ends_at_calls and tools.ends_reasoning
    # a model may call in the middle of a thought, without closing it
    calls = tools.states["content"].delimiters if ends_at_calls else {}
    return {
        "before": ParserState(Reads.LEAD, {**ends, **openings}, then=tools.start),
        **dict.fromkeys(
            ("again", ASSUMED), ParserState(Reads.LEAD, {**openings, **label}, then="reasoning")
        ),
        **({"label": ParserState(Reads.LEAD, label, then="reasoning")} if label else {}),
        **({"content": reopened} if reasoning.reopens else {}),
        "reasoning": ParserState(
            Reads.REASONING,
            {**calls, **ends, **dict.fromkeys(reasoning.ends_before, tools.start)},
            kept=frozenset(reasoning.ends_before),
        ),
        **(tagged if tags else {}),
        **(trimmed if reasoning.trims_answer else {}),
    }
