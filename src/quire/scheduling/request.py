"""A request in the scheduler: counts, blocks, and the stop conditions on its token ids. Owned and
changed by the scheduler alone. Stop strings, which need text, are checked by the front end.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from quire.params import RequestParams, SamplingParams
from quire.step.media import EmbeddedSpan, MediaItem, Source
from quire.step.plan import NewRow


class State(enum.IntEnum):
    """Stage of a request's life; everything above PREEMPTED is final."""

    WAITING = 0
    RUNNING = 1
    IDLE = 2
    """Stopped for now, holding its row and blocks until more input arrives (`Scheduler.extend`)."""
    PREEMPTED = 3
    FINISHED = 4


class Reason(enum.IntEnum):
    """Reason for the end of a request; the numbers are those of the wire protocol."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class Prerequisite(Protocol):
    """Something outside the scheduler that a request waits for before it gets a row: a grammar
    that is being compiled, weights of an adapter that are being loaded.
    """

    @property
    def is_ready(self) -> bool:
        """Whether the request can run already. Once true it stays true."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until it is ready, at most for `timeout_s`. The scheduler never calls this."""
        ...


class OutputGrammar(Prerequisite, Protocol):
    """A grammar that the output must follow, and that determines where it ends."""

    def has_ended(self, output_token_ids: Sequence[int]) -> bool:
        """Whether the output is complete and nothing may follow. May raise RequestError."""
        ...


class Stop(NamedTuple):
    """Reason of a stop, and the token or pattern that caused it, if any. `is_in_text`:
    its last token belongs to its text.
    """

    reason: Reason
    what: int | str | None = None
    is_in_text: bool = False


class NextInput(NamedTuple):
    """Input that a resumable request takes when it stops; `params` None: unchanged."""

    token_ids: list[int]
    resumable: bool
    params: SamplingParams | None
    needs_host_ids: bool


@dataclass(slots=True, eq=False)
class Request:
    """One generation, or one prompt that is pooled.

    A length is a count: `num_prompt_tokens` may exceed `len(prompt_token_ids)` once inputs without
    ids exist, so nothing here uses the length of the prompt's ids.

    Invariants (checked by `tests/support/simulation/invariants.py`):
    - 0 <= num_confirmed_tokens <= num_computed_tokens, and both are 0 without a row;
    - a table entry is NULL_BLOCK or a block that this request holds one reference to;
    - entries that a future query can read are never NULL_BLOCK.

    `prerequisites` must be ready before the request gets a row; its grammar is one of them.
    """

    handle: int
    prompt_token_ids: list[int]
    params: RequestParams
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
    prerequisites: Sequence[Prerequisite] = ()
    queued_time: float = 0.0
    """Time of `Scheduler.add`, by the clock of `Scheduler.schedule`."""
    adapter: int = 0
    """Number of its LoRA adapter; 0: no adapter. Equal numbers mean equal weights."""
    weights: int = 0
    """The number of the weights that its blocks are computed with; set by the scheduler."""
    media: Sequence[MediaItem] = ()
    """The media at placeholders among the prompt's ids, by position, and its second content."""
    positions: Any = None
    position_offset: int = 0
    """See `NewRow`."""
    adapter_slot: int = 0
    """Slot of its adapter while it has a row; 0: none."""
    num_passes: int = 0
    """Number of times that it was passed over for lack of a slot since it last had a row."""
    is_indivisible: bool = False
    """Its prompt is computed in one step, and it is not preempted while that step is in flight."""

    num_prompt_tokens: int = field(init=False)
    embedded: Sequence[EmbeddedSpan] = field(init=False, default=())
    source: MediaItem | None = field(init=False, default=None)
    """Its second content, an item of its media."""
    max_total_tokens: int = 0
    """Prompt and output together; set by `Scheduler.add` from max_tokens and the model's length."""
    is_whole: bool = False
    """All tokens that it lacks are computed in one step; set by `Scheduler.add`."""
    stop_ids: Sequence[int] = ()
    """The ids that can end it; set by `Scheduler.add`."""
    state: State = State.WAITING
    order: int = 0
    """Rank of arrival, the tie-break of every policy."""
    row: int = -1
    num_computed_tokens: int = 0
    """Tokens whose K/V is in the cache once every step in flight has run, if all their drafts are
    accepted. For members of the decode lane, the lane counts instead.
    """
    num_confirmed_tokens: int = 0
    """Tokens whose K/V finished steps have written; a lower bound while `is_decoding`."""
    is_decoding: bool = False
    """It has sampled since it got its row, so all tokens but the newest have their K/V."""
    has_started: bool = False
    scheduled_time: float = 0.0
    num_cached_tokens: int | None = None
    """Prefix-cache hit at first admission; None before."""
    num_drafts: int = 0
    """Drafts that are ready in its row, according to the last known result."""
    num_drafts_in_flight: int = 0
    """Drafts that steps in flight verify; all of them may turn out wrong."""
    num_preemptions: int = 0
    preempted_times: list[float] = field(default_factory=list)
    """Times of its preemptions, by the clock of `Scheduler.schedule`."""

    load: Prerequisite | None = None
    """The load of cached blocks that it waits or has waited for since it last had a row."""
    external: Prerequisite | None = None
    """The load by a connector that it waits or has waited for since it last had a row."""
    is_spoiled: bool = False
    """Whether a connector could not load what it had offered: all of it is computed."""
    num_hit_tokens: int = 0
    """Tokens found by the last lookup in the prefix cache, and those that its first step loads."""
    num_unloaded_tokens: int = 0
    """Number of the last tokens of the hit, which its first step loads."""
    writes_source: bool = False
    """Whether its first chunk writes the blocks of its source, which are not cached."""
    source_name: bytes = b""
    """The beginning of the keys of its source's blocks, according to the last lookup."""
    block_ids: tuple[list[int], ...] = ()
    capacity: int = 0
    """The number of tokens that its blocks can hold."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of its blocks of the scheduler's block size, in order."""
    num_published_tokens: int = 0
    num_expired: list[int] = field(default_factory=list)
    """Number of leading table entries that were released, by group."""
    takes_snapshot: bool = False
    """Whether it goes on in the very blocks of the snapshot that it hits, for lack of others."""
    snapshot_ends: list[int] = field(default_factory=list)
    """Lengths at which chunks must end so that the recurrent state can be saved, ascending."""
    snapshots: dict[int, list[int]] = field(default_factory=dict)
    """Ends of chunks -> blocks that a step in flight copies the state there to, one per group
    of recurrent state.
    """
    num_state_updates: int = 0
    """Chunks since it got its row; each advances its recurrent state in the ring."""

    joined: int = 0
    """Tick of the lane at which the step was planned whose token is its first one there."""
    due: int = -1
    """Tick of the lane's next event for this request."""
    pending_input: list[NextInput] = field(default_factory=list)
    """Inputs not yet used, in the order of `Scheduler.extend`."""
    last_stop: Stop | None = None
    """Reason why an idle request stopped."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        if self.media:
            self.give_media(self.media)
        if self.grammar is not None:
            self.constrain(self.grammar)

    def constrain(self, grammar: OutputGrammar) -> None:
        """Have the output follow a grammar, which the request waits for. Before it is queued."""
        self.grammar = grammar
        self.prerequisites = [grammar, *self.prerequisites]

    def give_media(self, media: Sequence[MediaItem]) -> None:
        """Set what stands in its prompt. Before it is queued."""
        self.media = media
        self.embedded = [span for item in media for span in item.spans()]
        self.source = next((item for item in media if not item.places), None)

    @property
    def num_tokens(self) -> int:
        """The number of known prompt and output tokens."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def generates(self) -> bool:
        """Whether it samples tokens; if not, it ends with its prompt."""
        return isinstance(self.params, SamplingParams)

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of a generation."""
        assert isinstance(self.params, SamplingParams), f"request {self.handle} draws no tokens"
        return self.params

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose K/V is known to be in this request's blocks."""
        return self.num_tokens - 1 if self.is_decoding else self.num_confirmed_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def is_protected(self) -> bool:
        """Whether it may not be preempted, because its prompt is indivisible and not done."""
        return self.is_indivisible and self.state is State.RUNNING and not self.is_decoding

    @property
    def is_ready(self) -> bool:
        """Whether all its prerequisites are ready."""
        return all(prerequisite.is_ready for prerequisite in self.prerequisites)

    def embedded_in(self, start: int, end: int) -> bytes:
        """Name what is embedded at positions [start, end): where, and by which digests."""
        names = []
        for span in self.embedded:
            if span.start < end and start < span.end:
                place = span.start - start, span.end - start, span.first_row
                names.append(struct.pack("<4q", len(span.digest), *place) + span.digest)
                if span.prefix:  # on all of which its keys and values depend
                    names.append(struct.pack("<q", span.prefix))
        return b"".join(names)

    def media_between(self, start: int, end: int) -> list[MediaItem]:
        """The items with positions in [start, end), and the source if tokens there write it."""
        items = [item for item in self.media if item.start < end and start < item.end]
        if self.writes_source and self.source and start <= self.num_hit_tokens < end:
            items.insert(0, self.source)
        return items

    def least_chunk(self, position: int) -> int:
        """The fewest tokens that a step may compute from `position` on: all of an item whose
        positions attend to each other.
        """
        for item in self.media:
            if item.whole is not None and item.whole[0] <= position < item.whole[1]:
                return item.whole[1] - position
        return 1

    def end_of_chunk(self, position: int, end: int) -> int:
        """The latest end of a chunk of tokens [position, end) that does not split such an
        item; `position` if it has no token then.
        """
        for item in self.media:
            if item.whole is not None and item.whole[0] < end < item.whole[1]:
                return max(position, item.whole[0])
        return end

    def new_row(self, num_computed_tokens: int) -> NewRow:
        """Return everything that the runner needs to build this request's row."""
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
            adapter=self.adapter_slot,
            embedded=self.embedded,
            positions=self.positions,
            position_offset=self.position_offset,
            source=self._source_of_row(),
        )

    def _source_of_row(self) -> Source | None:
        source = self.source
        if source is None:
            return None
        return Source(source.digest, source.num_rows, is_written=not self.writes_source)

    def limit_length(self, max_model_len: int) -> None:
        """Set the maximum length of the request, from its max_tokens and the model's length."""
        self.max_total_tokens = self.num_prompt_tokens
        if self.generates:
            max_tokens = self.sampling.max_tokens
            assert max_tokens is not None, "the input processor resolves max_tokens"
            self.max_total_tokens = min(max_model_len, self.num_prompt_tokens + max_tokens)

    def append_input(self, token_ids: list[int]) -> None:
        """Make all but the newest token prompt and append more: the next turn of a resumable
        request.
        """
        kept = self.num_tokens - 1
        self.prompt_token_ids = [*self.prompt_token_ids, *self.output_token_ids[:-1], *token_ids]
        self.num_prompt_tokens = kept + len(token_ids)
        self.output_token_ids = []

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the ids of tokens [start, end)."""
        border = self.num_prompt_tokens
        if end <= border:
            return self.prompt_token_ids[start:end]
        if start >= border:
            return self.output_token_ids[start - border : end - border]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - border]


def check_stop(request: Request) -> Stop | None:
    """Return why the last output token ends the request, or None. Checked in the documented order:
    EOS, stop ids, the end of its grammar, length, repetition.
    """
    params, output = request.sampling, request.output_token_ids
    token = output[-1]
    if token == params.eos_token_id and not params.ignore_eos:
        return Stop(Reason.STOP)
    if params.stop_token_ids and token in params.stop_token_ids:
        return Stop(Reason.STOP, token)
    if request.grammar is not None and request.grammar.has_ended(output):
        return Stop(Reason.STOP, is_in_text=True)
    if request.num_tokens >= request.max_total_tokens:
        return Stop(Reason.LENGTH)
    if params.repetition_detection is not None and len(output) >= params.min_tokens:
        rule = params.repetition_detection
        if _repeats(output, rule.min_pattern_size, rule.max_pattern_size, rule.min_count):
            return Stop(Reason.REPETITION, "repetition_detected")
    return None


def find_stop(request: Request, num_new: int) -> tuple[Stop | None, int]:
    """Find the first of the `num_new` newest tokens that ends the request. Returns the stop, and
    how many tokens after it were dropped from its output.
    """
    if num_new == 1:
        return check_stop(request), 0
    output = request.output_token_ids
    later = output[len(output) - num_new + 1 :]
    del output[len(output) - num_new + 1 :]
    # token by token, since `check_stop` looks at the end of the output
    for dropped in range(num_new - 1, 0, -1):
        stop = check_stop(request)
        if stop is not None:
            return stop, dropped
        output.append(later[-dropped])
    return check_stop(request), 0


def ends_with_prompt(request: Request) -> bool:
    """Whether the request samples no tokens and its prompt is computed."""
    return not request.generates and request.num_confirmed_tokens == request.num_tokens


def stop_ids(request: Request) -> list[int]:
    """Return the ids that can end this request."""
    if not request.generates:
        return []
    params = request.sampling
    ids = list(params.stop_token_ids or ())
    if params.eos_token_id is not None and not params.ignore_eos:
        ids.append(params.eos_token_id)
    return ids


def _repeats(output: list[int], smallest: int, largest: int, count: int) -> bool:
    """Whether the output ends with `count` equal blocks of some pattern size."""
    for size in range(max(1, smallest), largest + 1):
        length = size * count
        if length > len(output):
            return False
        tail = output[-length:]
        # equal to itself moved by one pattern: then all of its patterns are equal
        if tail[size:] == tail[:-size]:
            return True
    return False
