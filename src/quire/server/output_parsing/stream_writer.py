"""The events of one output as its readers write them, and the text that is not decided yet."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from quire.server.output_parsing.call_ids import CallId
from quire.server.output_parsing.delimiters import BLANKS, NON_BLANK
from quire.server.output_parsing.events import (
    ArgumentText,
    CallStarted,
    ContentText,
    Event,
    ReasoningText,
)

MAX_HEAD_CHARS = 512
"""Longer than any tool's name and any message's header: more is not a call."""


class Writer:
    """Events of one output, and the text that may turn out to be a call's markup.

    `is_undecided`: what is read is held until it is a call (`start_call`, which drops it) or is
    none (`release`, which writes it). `touches_call`: no text but blanks has come since the
    beginning or the last call; such blanks are held too, because they may be between calls, and
    with `trims` all at the end of the answer, because a call may follow them. With `max_calls`
    later calls are read and left out. `is_checked`: the last call is one only if it turns out to be
    valid (`settle`); until then its events wait. `thoughts`: the reasoning so far, where somebody
    wants it.
    """

    __slots__ = ("_call_id", "_events", "_held", "_is_spoilt", "_max_calls", "_trims", "_waiting",
                 "_written", "call_name", "is_checked", "is_undecided", "num_calls",
                 "thoughts", "touches_call")  # fmt: skip

    def __init__(
        self, call_id: CallId, max_calls: int | None, holds_blanks: bool, trims: bool
    ) -> None:
        self._call_id = call_id
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._held: list[str] = []
        self.is_undecided = False
        self._trims = holds_blanks and trims
        self.touches_call = holds_blanks
        self.num_calls = 0
        self.call_name = ""
        self.is_checked = self._is_spoilt = False
        self._waiting: list[Event] = []
        self._written: list[str] = []
        self.thoughts: list[str] | None = None

    def take(self) -> list[Event]:
        """The events since the last time, consecutive pieces of one text joined."""
        if len(self._events) > 1:
            self._events = _merged(self._events)
        events, self._events = self._events, []
        return events

    def hold(self, text: str) -> None:
        """Keep text back: of a call, or nothing."""
        if text:
            self._held.append(text)

    def drop(self) -> None:
        """Drops the held text, which was markup."""
        self._held.clear()
        self.is_undecided = False

    def release(self, is_reasoning: bool = False) -> None:
        """Releases the held text, which was not a call."""
        text = "".join(self._held)
        self.drop()
        if is_reasoning:
            self.reasoning(text)
        else:
            self.content(text)

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningText(text))
            if self.thoughts is not None:
                self.thoughts.append(text)

    def content(self, text: str) -> None:
        if self.is_checked:
            # text within a checked call shows that it is not one
            self._is_spoilt = self._is_spoilt or NON_BLANK.search(text) is not None
        elif (self.touches_call or self._trims) and NON_BLANK.search(text) is None:
            self.hold(text)
        elif text:
            self.touches_call = False
            text = "".join([*self._held, text])
            kept = text.rstrip(BLANKS) if self._trims else text
            self._held[:] = [text[len(kept) :]] if len(kept) < len(text) else []
            self._events.append(ContentText(kept))

    def write_blanks(self) -> None:
        """The blanks at the end of the answer are a part of it."""
        if self._held and not (self.is_undecided or self.touches_call or self.is_checked):
            self._events.append(ContentText("".join(self._held)))
            self._held.clear()

    def start_call(
        self, name: str, call_id: str | None = None, *, is_checked: bool = False
    ) -> None:
        """Starts a call, of which the held text was the beginning."""
        beginning = "".join(self._held)
        if self.is_checked:
            written = "".join(self._written)
            # the call before was not ended, so that it is text, up to where this one begins
            self._written[:] = [written[: len(written) - len(beginning)]]
            self.settle(None)
        self.drop()
        self.is_checked, self._is_spoilt, self._written[:] = is_checked, False, [beginning]
        self.call_name = name
        index = self.num_calls
        self.num_calls += 1
        self._tell(CallStarted(index, call_id or self._call_id(name, index), name))

    def arguments(self, text: str) -> None:
        if text:
            self._tell(ArgumentText(self.num_calls - 1, text))

    def _tell(self, event: Event) -> None:
        if self.is_checked:
            self._waiting.append(event)
        elif self._max_calls is None or self.num_calls <= self._max_calls:
            self._events.append(event)

    def keep(self, text: str) -> None:
        """The next piece of a checked call as the model wrote it."""
        self._written.append(text)

    @property
    def written_arguments(self) -> str:
        """The arguments of a checked call, so far."""
        return "".join(event.text for event in self._waiting if isinstance(event, ArgumentText))

    def settle(self, arguments: str | None) -> None:
        """A checked call is complete, with these arguments; None: it is text as it was written."""
        events, self._waiting, self.is_checked = self._waiting, [], False
        if arguments is not None and not self._is_spoilt:
            self._tell(events[0])
            self.arguments(arguments)
            return
        # the next call takes its index
        self.num_calls -= 1
        self._held.clear()
        self.is_undecided = False
        self.content("".join(self._written))

    def finish(self, rest: str) -> None:
        """The output ended in the answer. Blanks that follow a call, and the beginning of the
        delimiter that would have ended it, were markup; other held text is content.
        """
        if self.is_checked:
            self.keep(rest)
            self.settle(None)
            rest = ""
        if not (self.touches_call and self.num_calls):
            text = "".join(self._held) + rest
            self._held.clear()
            if text:
                self._events.append(ContentText(text))


def _merged(events: list[Event]) -> list[Event]:
    """Consecutive pieces of the same text as one event."""
    merged: list[Event] = []
    for _, group in groupby(events, _text_key):
        first, *others = group
        if others and not isinstance(first, CallStarted):
            texts = [event.text for event in others if not isinstance(event, CallStarted)]
            first = replace(first, text=first.text + "".join(texts))
        merged.append(first)
    return merged


def _text_key(event: Event) -> tuple[type, int | None]:
    return type(event), event.index if isinstance(event, ArgumentText | CallStarted) else None
