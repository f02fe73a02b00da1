"""Formats as data: an output is parsed by a table of states, and a format is such a table.

A state says what its text is and which delimiters end it; a delimiter leads to the next state. Two
worked examples, the first without the second's parameters:

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>

    ToolFormat("tagged", {
        "content": ParserState(Reads.CONTENT, {"<tool_call>": "call"}),
        "call": ParserState(Reads.ENVELOPE, {"</tool_call>": "content"}, then="after"),
        "after": ParserState(Reads.CONTENT, {"</tool_call>": "content", "<tool_call>": "call"}),
    })

    CALL f a: 1 END

    ToolFormat("spoken", {
        "content": ParserState(Reads.CONTENT, {"CALL ": "name"}),
        "name": ParserState(Reads.HEAD, {" ": "key", "END": "done"}, kept={"END"}),
        "key": ParserState(Reads.KEY, {": ": "value"}),
        "value": ParserState(Reads.VALUE, {" END": "done", "; ": "key"}),
        "done": ParserState(Reads.CONTENT, {"END": "content"}, closes=True),
    })

Where the text is not what the table expects, it is content: nothing is lost, nothing made up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from quire.server.output_parsing.call_ids import CallId, plain_call_id
from quire.server.output_parsing.delimiters import check_delimiters


class Reads(Enum):
    """Kind of the text of a state, up to the state's delimiters."""

    CONTENT = auto()
    """The answer. Blanks that touch nothing but calls are markup."""
    REASONING = auto()
    """The reasoning."""
    LEAD = auto()
    """Blanks before a delimiter that is markup by itself; other text belongs to `then`."""
    BLANK = auto()
    """Blanks within a call's markup; other text belongs to `then`, or this is not a call."""
    HEAD = auto()
    """An announcement: the name of a call, or the destination of a message. `head` reads it."""
    ENVELOPE = auto()
    """One JSON object with a call's name and arguments; `then` follows it."""
    JSON = auto()
    """The arguments as one JSON value, passed on as written; `then` follows it."""
    TEXT = auto()
    """The arguments, passed on as written."""
    PYTHON = auto()
    """One call as Python writes it, `name(key=literal, ...)`; `then` follows it."""
    KEY = auto()
    """The name of one argument; its delimiter leads to a VALUE."""
    VALUE = auto()
    """One argument as text, written as JSON of the type in the tool's schema."""
    LOOSE = auto()
    """The rest of an object, after its `{`, whose keys have no quotes and whose strings stand
    between `mark`s; `then` follows it.
    """
    ELEMENTS = auto()
    """The arguments as elements, `<a>...</a>`, that may hold others; each tag follows a `mark`."""


FLOWING = frozenset({Reads.CONTENT, Reads.REASONING})
"""Kinds that a client sees as text; every other state is undecided text or part of a call."""
OPENING = frozenset({Reads.LEAD, Reads.BLANK, Reads.HEAD, Reads.ENVELOPE, Reads.PYTHON})
"""States whose text is held back until it is known to be a call."""
ENDING = frozenset({Reads.ENVELOPE, Reads.JSON, Reads.PYTHON, Reads.LOOSE})
"""States that end by themselves, so that they need a `then`."""


@dataclass(frozen=True, slots=True)
class Head:
    """Content of a HEAD. With a `name` a call starts (`call_id` if the model gave one); without
    one, what was read so far is markup (`is_held`: if a call follows, else text). `then` overrules
    the delimiter's state.
    """

    name: str | None = None
    call_id: str | None = None
    then: str | None = None
    is_held: bool = False


def name_alone(text: str) -> Head | None:
    """The head of most formats: the name of a call and nothing else. None: this is not a call."""
    return Head(text.strip()) if text.strip() else None


@dataclass(frozen=True, slots=True)
class Key:
    """The meaning of a KEY for the next value: the `name` of its argument (None: the one before),
    and the JSON `types` that it is declared to have, which count where the tool's schema says
    nothing.
    """

    name: str | None
    types: frozenset[str] = frozenset()


def key_alone(text: str) -> Key:
    """The key of most formats: the name of an argument and nothing else."""
    return Key(text.strip())


@dataclass(frozen=True, slots=True)
class ParserState:
    """One state of the parser.

    `delimiters`: what ends it -> the next state; no delimiter may contain another. `kept`:
    delimiters that are read again by the next state. `then`: see `Reads`; a CONTENT state with a
    `then` is left for it by the first text that is not blank, and with `trims` the blanks before
    that are markup. `closes`: entering it completes the
    arguments that KEY and VALUE states wrote. `calls`: entering it starts a call of this name. For
    HEAD: `head` reads it, `bars` are characters that it cannot have, `begins` are the only
    beginnings it can have. For KEY: `key` reads it. For VALUE: `followers` of a delimiter are what
    must come after it, blanks aside, unless the output ends there; otherwise it is a part of the
    value. A value that begins with the first of `verbatim` goes on to the second, whatever is
    between. For LOOSE and ELEMENTS: `mark`, see `Reads`.
    """

    reads: Reads
    delimiters: Mapping[str, str] = field(default_factory=dict)
    then: str | None = None
    kept: frozenset[str] | set[str] = frozenset()
    trims: bool = False
    closes: bool = False
    calls: str | None = None
    head: Callable[[str], Head | None] = name_alone
    bars: str = "\n"
    begins: tuple[str, ...] = ()
    key: Callable[[str], Key] = key_alone
    followers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    verbatim: tuple[str, str] | None = None
    mark: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text that it looks for."""
        others = (*self.begins, *(self.verbatim or ()), *([self.mark] if self.mark else []))
        return (*self.delimiters, *others)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form in which a family of models writes tool calls.

    `states` has at least "content"; `start` is where the answer begins. `call_id` makes the ids.
    `name_key` and `argument_keys`: keys of an envelope whose values are the name and the arguments.
    `names_are_keys`: instead, the name is the only key and the arguments are its value.
    `other_keys`: the keys that an envelope may have besides; None: any. `lone_names`: an envelope
    without arguments is a call of a tool that takes none. `only_known_names`: what has another name
    than those of the request's tools is not a call. `checks_calls`: nor is one that was not ended,
    lacks an argument that its tool requires, or has one twice; arguments that the tool does not
    have are left out. `trims_answer`: blanks before a call are markup. `ends_reasoning`: calls may
    end a reasoning whose format allows it. `pads_values`: a VALUE that begins on a line of its own
    ends on one. `has_reasoning`: the table has REASONING states of its own, and goes with the
    reasoning format of the same table only. `forced_calls`: for such a table, the formats (as
    structural tags have them) of a call of each of these functions (`{"name", "parameters"}`).
    `for_template`: the format as a chat template writes it, where its marks differ from one
    checkpoint to the next.
    Raises ValueError for a table that cannot be read.
    """

    name: str
    states: Mapping[str, ParserState]
    start: str = "content"
    call_id: CallId = plain_call_id
    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    names_are_keys: bool = False
    other_keys: frozenset[str] | None = None
    lone_names: bool = True
    only_known_names: bool = False
    checks_calls: bool = False
    trims_answer: bool = False
    ends_reasoning: bool = True
    pads_values: bool = False
    has_reasoning: bool = False
    forced_calls: Callable[[Sequence[Mapping[str, Any]]], list[Mapping[str, Any]]] | None = None
    for_template: Callable[[str], ToolFormat] | None = None

    def __post_init__(self) -> None:
        check_states(self.name, self.states, self.start)

    @property
    def delimiters(self) -> frozenset[str]:
        return frozenset(text for state in self.states.values() for text in state.texts)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Form in which a family of models writes its reasoning.

    `starts` and `ends` are its delimiters, and a `label` after the first is markup. `reopens`: the
    answer may be interrupted by more of it. `is_assumed`: an output begins inside the reasoning
    unless the prompt says otherwise. `ends_at_calls`: a tool call ends the reasoning without its
    delimiter; so do `ends_before`, delimiters that the answer begins with. `answer_tags`: what
    stands before and after the answer of some models, and is markup; `trims_answer`: so are the
    blanks before it. `stays_in_answer`: the reasoning is a part of the answer, with its delimiters.
    `table`: instead of delimiters, a table with REASONING states. For such a table, `answer_starts`
    are the delimiters after which the answer begins, `begins_call` is what a call begins with, and
    `output_of` makes the format of an output, as structural tags have it, from its place and the
    formats one of which it ends with. `for_template`: as of `ToolFormat`.
    """

    name: str
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    label: str = ""
    reopens: bool = False
    is_assumed: bool = False
    ends_at_calls: bool = True
    ends_before: tuple[str, ...] = ()
    answer_starts: tuple[str, ...] = ()
    answer_tags: tuple[str, ...] = ()
    trims_answer: bool = False
    stays_in_answer: bool = False
    begins_call: str = ""
    output_of: Callable[[str, Sequence[Mapping[str, Any]]], Mapping[str, Any]] | None = None
    table: ToolFormat | None = None
    for_template: Callable[[str], ReasoningFormat] | None = None

    def __post_init__(self) -> None:
        if not (self.starts and self.ends):
            raise ValueError(
                f"Reasoning format {self.name!r} needs delimiters of its start and its end."
            )


def check_states(name: str, states: Mapping[str, ParserState], start: str) -> None:
    """Raise ValueError with the first reason why these states are not a table."""
    if "content" not in states or states["content"].reads is not Reads.CONTENT:
        raise ValueError(f"Format {name!r} needs a state 'content' that reads CONTENT.")
    # the start is checked like a state, so that a format without it is refused too
    for place, state in {"start": ParserState(Reads.LEAD, then=start), **states}.items():
        where = f"state {place!r} of format {name!r}"
        check_delimiters(state.delimiters)
        targets = [*state.delimiters.values(), *([] if state.then is None else [state.then])]
        if missing := [target for target in targets if target not in states]:
            raise ValueError(f"The {where} leads to {missing}, which does not exist.")
        if state.reads in ENDING and state.then is None:
            raise ValueError(f"The {where} ends by itself and needs a 'then'.")
        _check_then(where, state, states)


def _check_then(where: str, state: ParserState, states: Mapping[str, ParserState]) -> None:
    """Checks that text which is handed on is read in the end: chains of `then` have one step."""
    hands_on = state.reads in (Reads.CONTENT, Reads.BLANK) and state.then is not None
    if hands_on and states[state.then].reads in (Reads.CONTENT, Reads.LEAD, Reads.BLANK):  # type: ignore[index]
        follower = states[state.then]  # type: ignore[index]
        if follower.then is not None:
            raise ValueError(f"The {where} hands on to a state that hands on.")
    if unknown := sorted(set(state.kept) - set(state.delimiters)):
        raise ValueError(f"The {where} keeps {unknown}, which are not among its delimiters.")
