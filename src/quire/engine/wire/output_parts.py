"""The parts of what a core sends: how requests begin and end."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Self

import msgspec


class FinishReason(enum.IntEnum):
    """Reason for the end of a request; `str()` is the word that users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


FINISH_REASON_STRINGS = tuple(map(str, FinishReason))
"""Words of the finish reasons, by number."""


class EngineCoreEventType(enum.IntEnum):
    """Events of a request in a core: it came, got a row for the first time, lost the row."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@dataclass(slots=True, frozen=True)
class EngineCoreEvent:
    """An event of a request, at `timestamp` (seconds, monotonic)."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(cls, event_type: EngineCoreEventType, timestamp: float | None = None) -> Self:
        """An event that happens now, or at `timestamp`."""
        return cls(event_type, time.monotonic() if timestamp is None else timestamp)


class Finished(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The one final state of a request; `message` says what went wrong when the reason is ERROR.

    `preempted_times` are in seconds, monotonic. `is_in_text` with STOP: the last token is the end
    of the text, which its grammar completed, and no stop token. `num_nans_in_logits` with ERROR:
    how many of the logits are NaN that its next token was to be drawn from.
    """

    handle: int
    reason: FinishReason
    stop_reason: int | str | None = None
    message: str | None = None
    num_preemptions: int = 0
    is_in_text: bool = False
    preempted_times: list[float] = []
    num_nans_in_logits: int = 0


class Started(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request's first output: when the core got it and scheduled it first (seconds, monotonic),
    what the prefix cache gave, and the number of its adapter.
    """

    handle: int
    num_cached_tokens: int
    scheduled_time: float
    queued_time: float = 0.0
    adapter: int = 0
