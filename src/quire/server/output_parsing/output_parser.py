"""The state machine that parses an output: a table of states, and the current one."""

from __future__ import annotations

from collections.abc import Mapping

from quire.server.output_parsing.call_ids import CallId
from quire.server.output_parsing.delimiters import Delimiters
from quire.server.output_parsing.ends import End
from quire.server.output_parsing.events import Event
from quire.server.output_parsing.formats.elements import Elements
from quire.server.output_parsing.formats.json_call import JsonCall
from quire.server.output_parsing.formats.loose_object import LooseObject
from quire.server.output_parsing.formats.parameters_as_text import (
    KeyReader,
    Parameters,
    ValueReader,
)
from quire.server.output_parsing.formats.python_call import PythonCall
from quire.server.output_parsing.readers import (
    HeadReader,
    JsonReader,
    Reader,
    TextReader,
    Undecided,
)
from quire.server.output_parsing.state_table import FLOWING, OPENING, ParserState, Reads, ToolFormat
from quire.server.output_parsing.stream_writer import Writer
from quire.server.output_parsing.tool_schemas import ToolSchemas, valid_arguments


class Table:
    """A format's states with their delimiters made ready; shared by all outputs, changed by none.

    `has_calls`: blanks may be a call's markup. `start`: where the answer begins, if not where the
    format's does. Raises ValueError where delimiters contain each
    other.
    """

    __slots__ = ("format", "has_calls", "delimiters", "start", "states")

    def __init__(
        self,
        tool_format: ToolFormat,
        states: Mapping[str, ParserState],
        has_calls: bool,
        start: str = "",
    ) -> None:
        self.format = tool_format
        self.states = dict(states)
        self.delimiters = {place: Delimiters(state.delimiters) for place, state in states.items()}
        self.start = start or tool_format.start
        self.has_calls = has_calls


class OutputParser:
    """Parses one output as its text arrives.

    For every way of cutting the text into pieces the events add up to the same: a
    decision is made when the text before it has fully come, and never taken back. What is held back
    between calls is the beginning of a delimiter (shorter than the delimiter), and from where a
    call may begin until its name is known, all of it; in a format that checks calls, until the call
    has ended. The answer
    begins with `lead`, which the prompt had. With `fills_answer`, the reasoning of an output that
    ends without a call and a character of an answer is said again as its answer (`is_filled`). Time
    is linear in the text.
    """

    __slots__ = ("_at", "_home", "_is_answered", "_kept", "_out", "_parameters", "_reader", "_rest",
                 "_schemas", "_table", "_text", "is_filled", "place", "state")  # fmt: skip

    def __init__(
        self,
        table: Table,
        place: str,
        schemas: ToolSchemas,
        call_id: CallId,
        max_calls: int | None = None,
        lead: str = "",
        fills_answer: bool = False,
    ) -> None:
        self._table = table
        trims = table.format.trims_answer
        self._out = Writer(call_id, max_calls, holds_blanks=table.has_calls, trims=trims)
        self._parameters = Parameters(schemas)
        self._schemas = schemas
        self._text, self._at, self._kept, self._rest = "", 0, 0, ""
        self._home = self.place = "content"
        self.state = table.states["content"]
        self._reader: Reader = TextReader(self.state, table.delimiters["content"])
        self._enter(place)
        self._out.content(lead)
        self._out.thoughts = [] if fills_answer else None
        self._is_answered = bool(lead)
        self.is_filled = False

    def feed(self, text: str) -> list[Event]:
        """Events of the next piece of the output; often none, never an exception."""
        self._text, self._at, self._kept = self._rest + text, 0, 0
        while self._step():
            pass
        self._rest = self._text[self._at :]
        return self._out.take()

    def finish(self) -> list[Event]:
        """The last events, when the output has ended; nothing may be fed after it."""
        out = self._out
        if out.is_checked:
            out.finish(self._rest)
        else:
            self._reader.finish(self._rest, out)
        if out.is_undecided:
            out.hold(self._rest)
            out.release(self._table.states[self._home].reads is Reads.REASONING)
            out.finish("")
        # the beginning of a delimiter is text now, and makes an answer
        is_cut = bool(self._rest) and self.state.reads is Reads.CONTENT
        if out.thoughts and not (self._is_answered or is_cut or out.num_calls):
            out.content("".join(out.thoughts))
            self.is_filled = True
        self._rest = ""
        return out.take()

    @property
    def num_calls(self) -> int:
        """Number of calls that have started, including those that were left out."""
        return self._out.num_calls

    def _step(self) -> bool:
        """Let the state's reader continue; False if it needs text that has not come."""
        start = self._at
        self._at, outcome = self._reader.read(self._text, start, self._out)
        if self._out.is_undecided:
            self._out.hold(self._text[start : self._at])
        if self.state.reads is Reads.CONTENT and self._at > start:
            self._is_answered = True
        self._keep()
        if outcome is End.MORE:
            return False
        if outcome is End.MISFIT:
            self._give_up()
        elif outcome is End.DONE:
            assert self.state.then is not None, "tables are checked"
            self._enter(self.state.then)
        else:
            assert isinstance(outcome, str), "the delimiter that was met"
            self._follow(outcome)
        return True

    def _keep(self) -> None:
        """Keeps the text read since the last time for the call that is checked, if there is one."""
        if self._out.is_checked:
            self._out.keep(self._text[self._kept : self._at])
        self._kept = self._at

    def _follow(self, delimiter: str) -> None:
        target = self.state.delimiters[delimiter]
        is_markup = delimiter in self.state.kept
        if isinstance(self._reader, HeadReader):
            head = self.state.head(self._reader.text)
            if head is None or not self._may_be_called(head.name):
                return self._give_up()
            target = head.then or target
            if head.name is not None:
                is_checked = self._table.format.checks_calls
                self._out.start_call(head.name, head.call_id, is_checked=is_checked)
                self._parameters.start()
            elif not head.is_held:
                self._out.drop()
                is_markup = True
        elif self.state.reads is Reads.LEAD:
            self._out.drop()
            is_markup = True
        # before `_enter`, which may write a checked call as text, with this delimiter
        self._at += 0 if delimiter in self.state.kept else len(delimiter)
        self._keep()
        return self._enter(target, "" if is_markup else delimiter)

    def _may_be_called(self, name: str | None) -> bool:
        is_free = name is None or not self._table.format.only_known_names
        return is_free or name in self._schemas.names

    def _enter(self, place: str, delimiter: str = "") -> None:
        """Be in a state, having met the delimiter that leads there."""
        state, out = self._table.states[place], self._out
        is_start = place == self._table.start
        if state.reads in (Reads.LEAD, Reads.REASONING):
            out.write_blanks()  # no call follows them
        if out.is_undecided:
            out.hold(delimiter)
            if state.reads in FLOWING:
                out.release(state.reads is Reads.REASONING)
        elif state.reads in OPENING:
            self._home = self._home_of(state)
            out.hold("" if is_start or state.reads is Reads.LEAD else delimiter)
            out.is_undecided = True
        elif state.reads in FLOWING and self.state.reads not in FLOWING:
            out.touches_call = self._table.has_calls
        elif state.reads in FLOWING and delimiter and out.touches_call:
            out.drop()  # blanks between two marks of a call
        if is_start:
            self._home = "content"
        if state.closes:
            self._parameters.close(out)
            if out.is_checked:
                out.settle(valid_arguments(out.written_arguments, out.call_name, self._schemas))
        if state.calls is not None:
            out.start_call(state.calls)
        self._be(place)

    def _home_of(self, state: ParserState) -> str:
        """Home of text that turns out not to be a call, if it may begin one now."""
        if state.reads is Reads.LEAD and state.then is not None:
            return state.then if self._table.states[state.then].reads in FLOWING else "content"
        if self.state.reads not in FLOWING:
            return "content"
        return self.state.then or self.place

    def _give_up(self) -> None:
        """This is not a call, or no longer one; the text goes on as what it was before."""
        if self._out.is_undecided:
            self._out.release(self._table.states[self._home].reads is Reads.REASONING)
            self._be(self._home)
        else:
            self._enter("content")

    def _be(self, place: str) -> None:
        self.place, self.state = place, self._table.states[place]
        self._reader = self._reader_of(self.state, self._table.delimiters[place])

    def _reader_of(self, state: ParserState, delimiters: Delimiters) -> Reader:
        match state.reads:
            case Reads.CONTENT | Reads.REASONING | Reads.TEXT:
                return TextReader(state, delimiters)
            case Reads.LEAD | Reads.BLANK:
                return Undecided(state, delimiters)
            case Reads.HEAD:
                return HeadReader(state, delimiters)
            case Reads.ENVELOPE:
                return JsonCall(self._table.format, delimiters, self._schemas.names)
            case Reads.JSON:
                return JsonReader(delimiters)
            case Reads.PYTHON:
                return PythonCall()
            case Reads.KEY:
                return KeyReader(state.key, delimiters, self._parameters)
            case Reads.VALUE:
                is_padded = self._table.format.pads_values
                return ValueReader(state, delimiters, self._parameters, is_padded, self._out)
            case Reads.LOOSE:
                return LooseObject(state, self._parameters)
            case Reads.ELEMENTS:
                return Elements(state, self._parameters)
