"""Requests, steps and blocks as connectors see them, by vLLM's names."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire.step.transfers import BlockKey


class RequestStatus(enum.IntEnum):
    """Status of a request."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 4
    RUNNING = 6
    PREEMPTED = 7
    FINISHED_STOPPED = 8
    FINISHED_LENGTH_CAPPED = 9
    FINISHED_ABORTED = 10
    FINISHED_IGNORED = 11
    FINISHED_ERROR = 12
    FINISHED_REPETITION = 13

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        """Whether the request has ended."""
        return status > RequestStatus.PREEMPTED


class ConnectorRequest:
    """A request of the scheduler, read as it stands.

    `request_id` is its handle in the core, in decimal: names of callers stay in the front end.
    """

    def __init__(self, request: Any, kv_transfer_params: dict[str, Any] | None) -> None:
        """request: `quire.scheduling.request.Request`."""
        self._request = request
        self.kv_transfer_params = kv_transfer_params
        self.status = RequestStatus.WAITING
        self.keyed_blocks: Callable[[], dict[BlockKey, int]] = dict
        """The full blocks that hold computed tokens, by the names of their contents."""

    @property
    def request_id(self) -> str:
        """The handle, in decimal."""
        return str(self._request.handle)

    external_req_id = request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        ids: list[int] = self._request.prompt_token_ids
        return ids

    @property
    def output_token_ids(self) -> list[int]:
        ids: list[int] = self._request.output_token_ids
        return ids

    @property
    def all_token_ids(self) -> list[int]:
        """Both."""
        ids: list[int] = self._request.token_ids(0, self._request.num_tokens)
        return ids

    @property
    def num_tokens(self) -> int:
        """The length of prompt and output."""
        count: int = self._request.num_tokens
        return count

    @property
    def num_prompt_tokens(self) -> int:
        count: int = self._request.num_prompt_tokens
        return count

    @property
    def num_output_tokens(self) -> int:
        return len(self._request.output_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose K/V is in its blocks."""
        count: int = self._request.num_reusable_tokens
        return count

    @property
    def num_preemptions(self) -> int:
        count: int = self._request.num_preemptions
        return count

    @property
    def sampling_params(self) -> Any:
        return self._request.params if self._request.generates else None

    @property
    def pooling_params(self) -> Any:
        return None if self._request.generates else self._request.params

    @property
    def priority(self) -> int:
        """The smaller runs first."""
        number: int = self._request.priority
        return number

    @property
    def arrival_time(self) -> float:
        """Wall-clock seconds."""
        seconds: float = self._request.arrival_time
        return seconds

    @property
    def cache_salt(self) -> str | None:
        """The salt that its K/V is shared under."""
        salt: str | None = self._request.cache_salt
        return salt

    @property
    def mm_features(self) -> list[Any]:
        """Empty: nothing is loaded for prompts with media."""
        return []

    @property
    def block_hashes(self) -> list[bytes]:
        """The names of its full blocks, each chained over everything before it."""
        keys: list[bytes] = self._request.keys
        return keys

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token is computed."""
        return bool(self._request.params.skip_reading_prefix_cache)

    @property
    def lora_request(self) -> None:
        """None: contents of adapters are in the names of blocks."""

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)


class KVCacheBlocks:
    """The blocks of a request, a table for each KV group."""

    def __init__(
        self, tables: Sequence[list[int]], to_load: Sequence[tuple[int, BlockKey]] = ()
    ) -> None:
        """to_load: the blocks that a load beside steps fills, with the names of their contents."""
        self._tables = tables
        self.to_load = to_load

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """The numbers of the blocks, a list for each KV group."""
        if allow_none and not any(self._tables):
            return None
        return tuple(list(table) for table in self._tables)

    def get_unhashed_block_ids(self) -> list[int]:
        """The blocks of the only group that are to be filled."""
        return [block for block, _ in self.to_load]


@dataclass(slots=True)
class NewRequestData:
    """A request that has got its first row, with all that its first step knows."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    sampling_params: Any = None
    pooling_params: Any = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    prefill_token_ids: list[int] | None = None


@dataclass(slots=True)
class CachedRequestData:
    """The requests of a step that have had one before: what is new of each. `new_block_ids`: all
    of its blocks for one that resumes after a preemption.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @property
    def resumed_from_preemption(self) -> list[bool]:
        """Whether each request resumes."""
        return [req_id in self.resumed_req_ids for req_id in self.req_ids]

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(slots=True)
class StepView:
    """The plan of a step, as a connector reads it."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    kv_connector_metadata: Any = None


@dataclass(slots=True)
class KVConnectorOutput:
    """The reports of a worker's half after a step."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None


@dataclass(slots=True, frozen=True)
class KVCacheGroup:
    """The layers of a KV group, and the tokens of its blocks."""

    layer_names: tuple[str, ...]
    block_size: int


@dataclass(slots=True, frozen=True)
class KVCacheConfig:
    """The blocks of an engine."""

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroup, ...]


@dataclass(slots=True)
class ForwardContext:
    """Context of the hooks of a step: the K/V memory of layers, by their names."""

    no_compile_layers: Mapping[str, Any]
    attn_metadata: Any = None
    virtual_engine: int = 0


@dataclass(slots=True)
class LayerView:
    """A layer's K/V memory, as `forward_context.no_compile_layers[name]`."""

    kv_cache: Tensor
