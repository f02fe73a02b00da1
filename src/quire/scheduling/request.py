"""A request as the scheduler knows it: counts, blocks and when to stop. Owned and changed by the
scheduler alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire.params import SamplingParams
from quire.scheduling.step import NewRow


class State(enum.IntEnum):
    """Where a request is in its life; everything above PREEMPTED is final."""

    WAITING = 0
    RUNNING = 1
    IDLE = 2
    """Stopped for now, holding its row and blocks until more input arrives (`Scheduler.extend`)."""
    PREEMPTED = 3
    FINISHED = 4


class Reason(enum.IntEnum):
    """Why a request ended; the numbers are those of the wire protocol."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class OutputGrammar(Protocol):
    """What decides, beside lengths and ids, where an output ends: a grammar that it follows."""

    @property
    def is_ready(self) -> bool:
        """Whether the request can run already."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until it is ready, but not longer."""
        ...

    def has_ended(self, output_token_ids: Sequence[int]) -> bool:
        """Whether the output is complete and nothing may follow. May raise RequestError."""
        ...


class Stop(NamedTuple):
    """Why a request stops: the reason, and which token or pattern if that says more. `is_in_text`:
    the last token is the end of its text, not a sign behind it.
    """

    reason: Reason
    what: int | str | None = None
    is_in_text: bool = False


class NextInput(NamedTuple):
    """Input that a resumable request takes when it stops; `params` None: those it has."""

    token_ids: list[int]
    resumable: bool
    params: SamplingParams | None
    needs_host_ids: bool


@dataclass(slots=True, eq=False)
class Request:
    """One generation.

    A length is a count: `num_prompt_tokens` may exceed `len(prompt_token_ids)` once inputs without
    ids exist, so nothing here asks for the length of the prompt's ids.

    Invariants (checked by `scheduling/invariants.py`):
    - 0 <= num_confirmed_tokens <= num_computed_tokens, and both are 0 without a row;
    - a table entry is NULL_BLOCK or a block that this request holds one reference to;
    - entries that a future query can read are never NULL_BLOCK.
    """

    handle: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    needs_host_ids: bool = False
    """Its next step may not be scheduled before the last sampled id is known on the host."""
    prompt_logprobs_done: bool = False
    resumable: bool = False
    grammar: OutputGrammar | None = None

    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = 0
    """Prompt and output together; set by `Scheduler.add` from max_tokens and the model's length."""
    stop_ids: Sequence[int] = ()
    """The ids that can end it; set by `Scheduler.add`."""
    state: State = State.WAITING
    order: int = 0
    """Rank of arrival, the tie-break of every policy."""
    row: int = -1
    num_computed_tokens: int = 0
    """Tokens whose K/V is in the cache once every step in flight has run (exact while not in the
    decode lane).
    """
    num_confirmed_tokens: int = 0
    """Tokens whose K/V finished steps wrote, as far as `is_decoding` does not say more."""
    is_decoding: bool = False
    """It has sampled since it got its row, so all tokens but the newest have their K/V."""
    has_started: bool = False
    scheduled_time: float = 0.0
    num_cached_tokens: int | None = None
    """Prefix-cache hit at first admission; None before."""
    block_ids: tuple[list[int], ...] = ()
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_expired: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    lane_offset: int = 0
    due: int = -1
    """Tick of the lane's next event for this request."""
    pending_input: list[NextInput] = field(default_factory=list)
    """In the order of `Scheduler.extend`."""
    last_stop: Stop | None = None
    """Why an idle request stopped."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that are known."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose K/V is known to be in this request's blocks."""
        return self.num_tokens - 1 if self.is_decoding else self.num_confirmed_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is State.FINISHED

    def new_row(self, num_computed_tokens: int) -> NewRow:
        """All that the runner needs to build this request's row."""
        return NewRow(
            row=self.row,
            handle=self.handle,
            token_ids=self.token_ids(0, self.num_tokens),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            block_ids=tuple(list(table) for table in self.block_ids),
            params=self.params,
            seed=self.seed,
            prompt_logprobs_done=self.prompt_logprobs_done,
        )

    def absorb(self, token_ids: list[int]) -> None:
        """Make all but the newest token prompt and append more: the next turn of a resumable
        request.
        """
        kept = self.num_tokens - 1
        self.prompt_token_ids = [*self.prompt_token_ids, *self.output_token_ids[:-1], *token_ids]
        self.num_prompt_tokens = kept + len(token_ids)
        self.output_token_ids = []

    def token_ids(self, start: int, end: int) -> list[int]:
        """The ids of tokens [start, end)."""
        border = self.num_prompt_tokens
        if end <= border:
            return self.prompt_token_ids[start:end]
        if start >= border:
            return self.output_token_ids[start - border : end - border]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - border]
