"""The messages between a front end and an engine core: requests go in, columns of new tokens come
out.

A request is known to the core by an integer handle that the front end chose; names stay in the
front end. The bits above `CLIENT_SHIFT` of a handle are the index of the front end, so that the
broker of several API servers knows whose request it is (shared_cores/broker.py). Structs that
travel as arrays grow at the end only, and every change of their meaning changes `PROTOCOL_VERSION`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, ClassVar, NoReturn, Self

import msgspec

from quire.encodable import NotEncodable, check_levels, text_of
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.core_output import EngineCoreOutput, columns_of, outputs_of
from quire.engine.wire.declared_types import check_message
from quire.engine.wire.output_list import OutputList
from quire.engine.wire.output_parts import Finished, Started
from quire.engine.wire.prompt_media import PromptMedia
from quire.errors import EngineError
from quire.lora.request import LoRARequest
from quire.params import PoolingParams, RequestParams, SamplingParams, checks
from quire.params.thinking import Thinking
from quire.processes.codec import MessageEncoder, num_bytes
from quire.step.columns import AnyPart, LogprobColumns

PROTOCOL_VERSION = 10
"""Front end and core must have the same; HELLO and READY carry it."""

CLIENT_SHIFT = 40
"""`handle >> CLIENT_SHIFT` is the index of the front end that gave the handle."""

FIRST_VERSION = "default"
"""The version of the weights that an engine starts with."""

MOST_RESULT_BYTES = 2**30
"""Bytes that the result of a call may have."""

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""First frame of the last message of a core that ends by an error; the second is the error."""


class EngineCoreRequestType(enum.Enum):
    """The type of a message to a core: the first byte of its first frame (`core_header`)."""

    ADD = b"\x00"
    """An EngineCoreRequest; of a handle that is alive already, its next input."""
    ABORT = b"\x01"
    """A list of handles."""
    START_DP_WAVE = b"\x02"
    """A StartWave, from the coordinator alone, whose socket carries nothing else."""
    UTILITY = b"\x03"
    """A UtilityRequest."""
    EXECUTOR_FAILED = b"\x04"
    """A worker's process has died; on the pipe between threads of a core, never on a socket."""
    WAKEUP = b"\x05"
    """Nothing but a reason to look; on the pipe between the threads of a core, never on a socket.
    """
    SHUTDOWN = b"\x06"
    """A number: the seconds that requests may still run."""


class AdapterRef(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """The LoRA adapter of a request: the caller's name and id for it, and its folder (absolute).

    `number` is that of the contents that earlier output was computed with; 0: there is none.
    """

    name: str
    id: int
    folder: str
    number: int = 0

    @classmethod
    def of(cls, request: LoRARequest) -> Self:
        """A request's adapter. Raises InvalidType or InvalidParameter for what cannot be sent."""
        check_message(request)
        name = checks.text("lora_name", request.lora_name)
        allowed = "it must be an int from 1 that fits 64 bits"
        number = checks.integer("lora_int_id", request.lora_int_id, 1, 2**63 - 1, allowed)
        return cls(name, number, str(request.folder))


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request, checked and completed by the input processor: a generation, or a pooling of its
    prompt, as the type of `params` says.

    `seed` is concrete, so that the sampled tokens are a function of this message alone.
    `output_token_ids` are tokens that were emitted before the core was restarted: the core
    continues after them. `data_parallel_rank` pins it to one core. `resumable` says that more input
    may follow under the same handle.

    `request_id` is the engine's own name of the request and `external_req_id` the caller's; the
    core goes by the handle. `prompt_text` and `trace_headers` are of one that a program gives to an
    engine in place of a prompt (frontend/prepared_request.py), and do not travel.
    """

    mm_features: ClassVar[None] = None
    prompt_embeds: ClassVar[None] = None

    handle: int = -1
    prompt_token_ids: list[int] = []
    params: RequestParams = msgspec.field(default_factory=SamplingParams)
    seed: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: list[int] = []
    prompt_logprobs_done: bool = False
    data_parallel_rank: int | None = None
    resumable: bool = False
    continues: bool = False
    """More input for a request that was sent as resumable; passed over when that has ended."""
    thinking: Thinking | None = None
    request_id: str = ""
    external_req_id: str | None = None
    trace_headers: dict[str, str] | None = None
    prompt_text: str | None = None
    adapter: AdapterRef | None = None
    media: PromptMedia | None = None
    """The media at placeholders among the ids."""

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter as the caller asks for it."""
        asked = self.adapter
        return None if asked is None else LoRARequest(asked.name, asked.id, asked.folder)

    @property
    def sampling_params(self) -> SamplingParams | None:
        """`params` of a generation."""
        return self.params if isinstance(self.params, SamplingParams) else None

    @property
    def client_index(self) -> int:
        """The front end that sent it."""
        return max(self.handle, 0) >> CLIENT_SHIFT

    @property
    def current_wave(self) -> NoReturn:
        """Raise AttributeError: requests belong to no wave."""
        text = "A request carries no wave: the coordinator of lock-step cores counts them."
        raise AttributeError(text, name="current_wave", obj=self)

    @property
    def pooling_params(self) -> PoolingParams | None:
        """`params` of a pooling request."""
        return self.params if isinstance(self.params, PoolingParams) else None


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A core after a step, for metrics: how it stands, and what was counted since the last ones.
    Of the waiting requests `num_deferred_reqs` cannot run yet, because a grammar is being made.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prefix_cache_requests: int = 0
    num_deferred_reqs: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    """Names of the LoRA adapters of these requests."""
    num_draft_tokens: int = 0
    num_accepted: list[int] = []
    """Steps by the number of a request's drafts that were right; [] where none were verified."""
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    """Tokens that the pool had not, and those of them that were loaded from outside of it."""
    kv_offload_load_bytes: int = 0
    kv_offload_store_bytes: int = 0
    nixl_bytes_transferred: int = 0
    nixl_num_descriptors: int = 0
    nixl_num_failed_transfers: int = 0
    nixl_num_kv_expired_reqs: int = 0
    """Bytes and blocks pulled from other engines, failed pulls, and requests nobody asked for."""

    @property
    def spec_decoding_stats(self) -> SpecDecodingStats | None:
        """Counts of the drafts since the last stats; None where there were none."""
        if not self.num_draft_tokens:
            return None
        return SpecDecodingStats.of(self.num_draft_tokens, self.num_accepted)

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """The lookups of admission in the prefix cache since the last stats."""
        return PrefixCacheStats(
            requests=self.prefix_cache_requests,
            queries=self.prefix_cache_queries,
            hits=self.prefix_cache_hits,
        )

    @property
    def connector_prefix_cache_stats(self) -> PrefixCacheStats:
        """Lookups outside of the pool, of what it had not."""
        return PrefixCacheStats(
            requests=self.prefix_cache_requests,
            queries=self.external_prefix_cache_queries,
            hits=self.external_prefix_cache_hits,
        )


@dataclass(slots=True, frozen=True)
class SpecDecodingStats:
    """Drafts of requests in steps: `num_drafts` times some were verified, `num_draft_tokens` in
    all; those at the i-th place were right `num_accepted_tokens_per_pos[i]` times.
    """

    num_spec_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]

    @classmethod
    def of(cls, num_draft_tokens: int, num_accepted: Sequence[int]) -> Self:
        """Statistics: `num_accepted[n]` times exactly n of a request's drafts were right."""
        of_at_least = list(accumulate(reversed(num_accepted)))[::-1]
        return cls(
            num_spec_tokens=len(num_accepted) - 1,
            num_drafts=of_at_least[0],
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=sum(of_at_least[1:]),
            num_accepted_tokens_per_pos=of_at_least[1:],
        )


@dataclass(slots=True, frozen=True)
class PrefixCacheStats:
    """Counts of requests that looked for `queries` tokens, of which `hits` were found."""

    requests: int = 0
    queries: int = 0
    hits: int = 0


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """The answer to a UtilityRequest: a result, or what went wrong and the name of its class in
    `quire.errors` ("" when it has none there).
    """

    call_id: int
    failure_message: str | None = None
    result: Any = None
    failure_type: str = ""

    @classmethod
    def of_result(cls, call_id: int, result: object) -> Self:
        """The answer to a call that gave `result`: a failure if that cannot be sent, so that the
        caller gets an answer in any case.
        """
        try:
            check_levels(result)
            frames = MessageEncoder().encode(result)
            if sum(map(num_bytes, frames)) > MOST_RESULT_BYTES:
                raise NotEncodable(f"it has more than {MOST_RESULT_BYTES} bytes")
        except NotEncodable as error:
            text = f"The result cannot be sent to another process: {error}."
            return cls.of_failure(call_id, EngineError(text))
        return cls(call_id, None, result)

    @classmethod
    def of_failure(cls, call_id: int, error: BaseException) -> Self:
        return cls(call_id, text_of(error), None, type(error).__name__)


class Heartbeat(msgspec.Struct, array_like=True, gc=False):
    """The state of a core's loop when this was sent: how many steps it has made, whether it has
    work, and for how many seconds it has been inside its current turn (0: it waits for input).
    `num_sent` and `num_taken` are the numbers of the last message to and from this front end.
    """

    num_steps: int = 0
    has_work: bool = False
    turn_age_s: float = 0.0
    num_sent: int = 0
    num_taken: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The output of one step, as columns: request `handles[i]` got `counts[i]` of the flat
    `token_ids` (None: one each).

    `parts` are the outputs apart from ids and their `logprobs`, of requests that have some
    (step/columns.py has the kinds). A request in `finished` may have no new token (an error, an
    abort by the core); one that pooled its prompt has its result in `parts` instead. Outputs of a
    core process carry its `incarnation`: a front end drops those of an earlier one. Their
    `sequence` counts the messages of one incarnation from 1, so that a lost one is noticed; 0 is a
    heartbeat, which overtakes them.

    One that a program made (documented.py) may have `names`: requests' ids, by handles that stand
    for them until a front end knows whose they are.
    """

    handles: list[int] = []
    token_ids: list[int] = []
    counts: list[int] | None = None
    finished: list[Finished] = []
    started: list[Started] = []
    logprobs: LogprobColumns | None = None
    parts: list[AnyPart] = []
    stats: SchedulerStats | None = None
    timestamp: float = 0.0
    engine_index: int = 0
    incarnation: int = 0
    utility_output: UtilityOutput | None = None
    heartbeat: Heartbeat | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    protocol_version: int = 0
    sequence: int = 0
    names: dict[int, str] = {}
    weight_version: str = FIRST_VERSION

    @property
    def outputs(self) -> OutputList:
        """One for each request with new tokens or an end; changing it changes the columns."""
        return OutputList(self, outputs_of(self))

    @outputs.setter
    def outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for name, column in columns_of(outputs, None).items():
            setattr(self, name, column)

    @property
    def scheduler_stats(self) -> SchedulerStats | None:
        """`stats`, by the reference's name."""
        return self.stats

    @property
    def finished_requests(self) -> set[str] | None:
        """The `request_id`s of the outputs that are their request's last; None without any."""
        return {self.names.get(end.handle, str(end.handle)) for end in self.finished} or None

    def __iter__(self) -> Iterator[EngineCoreOutput]:
        return outputs_of(self)


def handles_in(outputs: EngineCoreOutputs) -> list[int]:
    """The requests that a message says something of."""
    parts: Iterable[Any] = chain(outputs.finished, outputs.started, outputs.parts)
    return list(dict.fromkeys([*outputs.handles, *(part.handle for part in parts)]))


class UtilityRequest(msgspec.Struct, array_like=True, gc=False):
    """A call of a method (engine/control_verbs.py); the answer is a `UtilityOutput` with the same
    id. `timeout_s` is how long the caller waits (None: as long as it takes).
    """

    call_id: int
    method: str
    args: list[Any]
    timeout_s: float | None = None

    @classmethod
    def of(cls, call_id: int, utility: Utility[Any]) -> Self:
        """The message of a call. Raises NotEncodable for arguments that no receiver could take."""
        args = list(utility.args)
        check_levels(args)
        return cls(call_id, utility.method, args, utility.timeout_s)


class Hello(msgspec.Struct, array_like=True, gc=False):
    """A launcher of cores on another machine asks the first front end for its addresses."""

    protocol_version: int
    engine_indices: list[int]
    is_local: bool
    is_headless: bool
    plan_digest: str


class EngineZmqAddresses(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Addresses of the front end and the coordinator for cores: the endpoints to receive `input`
    from, and to send `output` to. `experts`: host and port at which cores of several machines meet
    that share experts; None: they meet in the socket folder.
    """

    input: str
    output: str
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    experts: str | None = None


class Welcome(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The answer to HELLO: the addresses and the incarnation of each core in the order of HELLO, or
    why they are refused. `may_change`: a core with that index is connected, or has died and that
    has not been noticed yet; ask again.
    """

    protocol_version: int
    addresses: EngineZmqAddresses | None = None
    refusal: str | None = None
    incarnations: list[int] = []
    num_cores: int = 1
    may_change: bool = False


class EngineCoreReadyResponse(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """READY, the first message of a core to each front end: who it is. Sent when it can serve."""

    protocol_version: int
    engine_index: int
    incarnation: int
    pid: int
    version: str = ""
    is_headless: bool = False


class StartWave(msgspec.Struct, array_like=True, gc=False):
    """The coordinator to every core of a group: this wave begins."""

    wave: int


class Counts(msgspec.Struct, array_like=True, gc=False):
    """The coordinator to front ends: each core's work, and the wave they are in or come to."""

    stats: dict[int, SchedulerStats] = {}
    wave: int = 0
    is_running: bool = False


class ReconfigureRankType(enum.IntEnum):
    """Fate of a core when the number of cores changes. Reserved: for groups of cores that
    are rebuilt while they serve; `scale_elastic_ep` adds and ends whole cores.
    """

    KEEP_CURRENT_RANK = -1
    SHUTDOWN_CURRENT_RANK = -2


class ReconfigureDistributedRequest(msgspec.Struct, gc=False):
    """Tells a lock-step core that the number of cores changes; it joins the new group at
    `new_data_parallel_master_ip`:port. Reserved, as `ReconfigureRankType`: no core takes it.
    """

    new_data_parallel_size: int
    new_data_parallel_rank: int
    new_data_parallel_rank_local: int
    new_data_parallel_master_ip: str
    new_data_parallel_master_port: int
