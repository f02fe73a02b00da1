"""The messages between a front end and an engine core: requests go in, columns of new tokens come
out.

A request is known to the core by a small integer handle that the front end chose; names stay in
the front end.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from quire.params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` is the word that users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One generation, checked and completed by the input processor.

    `seed` is concrete, so that the sampled tokens are a function of this message alone.
    `output_token_ids` are tokens that an earlier life of the request has emitted already: the core
    goes on behind them.
    """

    handle: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: list[int] = []
    prompt_logprobs_done: bool = False
    client_index: int = 0


class LogprobColumns(msgspec.Struct, gc=False):
    """Log-probabilities of M tokens in W columns (padding: id -1).

    `index[m]` says whose: the position in the flat `token_ids` of the outputs that carry this
    frame. Column 0 is the token itself, with its `ranks[m]`; `counts[m]` columns are valid.
    """

    index: list[int]
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    values: np.ndarray[Any, np.dtype[np.float32]]
    ranks: np.ndarray[Any, np.dtype[np.int32]]
    counts: list[int]


class PromptLogprobs(msgspec.Struct, gc=False):
    """The prompt's log-probabilities of one request: row i describes prompt token i + 1."""

    handle: int
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    values: np.ndarray[Any, np.dtype[np.float32]]
    ranks: np.ndarray[Any, np.dtype[np.int32]]


class Finished(msgspec.Struct, array_like=True, gc=False):
    """The one final state of a request; `message` says what went wrong when the reason is ERROR."""

    handle: int
    reason: FinishReason
    stop_reason: int | str | None = None
    message: str | None = None


class Started(msgspec.Struct, array_like=True, gc=False):
    """A request's first output: when it was scheduled first (seconds, monotonic) and what the
    prefix cache gave.
    """

    handle: int
    num_cached_tokens: int
    scheduled_time: float


class SchedulerStats(msgspec.Struct, gc=False):
    """Counts after a step, for metrics."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


class EngineCoreOutputs(msgspec.Struct, gc=False):
    """What one step brought, as columns: request `handles[i]` got `counts[i]` of the flat
    `token_ids` (None: one each).

    A request in `finished` may have no new token (an error, an abort by the core).
    """

    handles: list[int] = []
    token_ids: list[int] = []
    counts: list[int] | None = None
    finished: list[Finished] = []
    started: list[Started] = []
    logprobs: LogprobColumns | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    stats: SchedulerStats | None = None
    timestamp: float = 0.0
    engine_index: int = 0
