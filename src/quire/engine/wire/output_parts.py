"""The parts of what a core sends: how requests begin and end, and their columns beside the ids."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` is the word that users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


FINISH_REASON_STRINGS = tuple(map(str, FinishReason))
"""Those words, by number."""


class EngineCoreEventType(enum.IntEnum):
    """The events of a request in a core: the core got it, gave it a row for the first time, took
    the row away.
    """

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@dataclass(slots=True, frozen=True)
class EngineCoreEvent:
    """It happened at `timestamp` (seconds, monotonic)."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(cls, event_type: EngineCoreEventType, timestamp: float | None = None) -> Self:
        """An event that happens now, or at `timestamp`."""
        return cls(event_type, time.monotonic() if timestamp is None else timestamp)


class LogprobColumns(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of M tokens in W columns (padding: id -1).

    `index[m]` says whose: the position in the flat `token_ids` of the outputs that carry this
    frame. Column 0 is the token itself, with its `ranks[m]`; `counts[m]` columns are valid.
    """

    index: list[int]
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    values: np.ndarray[Any, np.dtype[np.float32]]
    ranks: np.ndarray[Any, np.dtype[np.int32]]
    counts: list[int]

    def at(self, places: Mapping[int, int]) -> LogprobColumns | None:
        """Those of the tokens in `places`, renumbered as given there; None if there are none."""
        kept = [m for m, place in enumerate(self.index) if place in places]
        if not kept:
            return None
        return LogprobColumns(
            index=[places[self.index[m]] for m in kept],
            token_ids=self.token_ids[kept],
            values=self.values[kept],
            ranks=self.ranks[kept],
            counts=[self.counts[m] for m in kept],
        )


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """The prompt's log-probabilities of one request: row i describes prompt token i + 1."""

    handle: int
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    values: np.ndarray[Any, np.dtype[np.float32]]
    ranks: np.ndarray[Any, np.dtype[np.int32]]


class RoutedExperts(msgspec.Struct, array_like=True, gc=False):
    """The experts that tokens of one request were sent to, from position `first` on: values [n, L,
    k] for n tokens and L layers, 0 in layers without experts.
    """

    handle: int
    first: int
    values: np.ndarray[Any, np.dtype[np.int16]]


class PooledOutput(msgspec.Struct, array_like=True, gc=False):
    """The result of one pooling request: a vector [D], or a vector for each token [n, D]."""

    handle: int
    values: np.ndarray[Any, np.dtype[np.float32]]


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
