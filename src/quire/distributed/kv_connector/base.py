"""The interface of connectors of K/V, by vLLM's names: a class is made twice, and one object plans
with the scheduler what the other one moves between steps of the worker.

A step calls the worker's half in this order: `handle_preemptions`, `bind_connector_metadata`,
`start_load_kv`, `wait_for_layer_load` for every layer; then the model computes; then
`save_kv_layer` for every layer, `wait_for_save`, the reports, and `clear_connector_metadata`. The
hooks of layers are called before and after all of the model: its steps are recorded, and have no
place for calls between layers. Where nothing is computed, no layer is saved.

K/V is given as it lies in memory, a tensor for each layer, whose first dimension is the block. Two
engines whose plans are alike have the same layout; how the numbers lie in a block is the concern of
who computes with them.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from quire.distributed.kv_connector.views import (
    ConnectorRequest,
    KVCacheBlocks,
    KVConnectorOutput,
    StepView,
)
from quire.distributed.kv_events import AnyKVCacheEvent


class WholeBlockCopies(Protocol):
    """Copies whole blocks of a KV group between K/V memory and [B] uint8 of the host."""

    def mark(self) -> Any:
        """The work that steps have queued so far, with a `wait`; None: it is done."""
        ...

    def read(self, group: int, block: int, slot: Tensor) -> bytes:
        """Copy a block to `slot` -> the checksum of its content."""
        ...

    def write(self, group: int, block: int, slot: Tensor) -> bytes:
        """Copy `slot` into a block -> the checksum of its content."""
        ...


class KVConnectorRole(enum.Enum):
    """The half of a connector that an object is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """The message of the scheduler's half to the worker's for a step."""


class KVConnectorHandshakeMetadata:
    """Facts for peers before they connect."""


class KVConnectorWorkerMetadata:
    """The message of the worker's half to the scheduler's after a step."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the messages of two workers."""
        raise NotImplementedError


class SupportsHMA(ABC):
    """A connector that takes part in models whose layers remember in several ways."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: ConnectorRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with a list of blocks for each KV group."""


class _Hooks:
    """The methods that do nothing unless a class has its own."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the K/V memory of every layer, when it was allocated."""

    def register_cross_layers_kv_cache(self, kv_cache: Tensor, attn_backend: Any) -> None:
        """Not called: layers have memory of their own."""

    def set_host_xfer_buffer_ops(self, copy_operation: Callable[..., Any]) -> None:
        """Not called: a connector copies by itself."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks of requests that were preempted will be written by the next step."""

    def shutdown(self) -> None:
        """The engine ends."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what the worker's half has reported after a step."""

    def on_new_request(self, request: ConnectorRequest) -> None:
        """A request has come."""

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what the workers' halves tell peers, by rank."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Not called: blocks are leased by the scheduler."""

    def bind_root(self, root: Callable[[], str | None]) -> None:
        """Give both halves a function that names all that K/V depends on apart from the keys of
        blocks. It may read the model's files. None: it is not known, as after a change of weights.
        """

    def bind_block_copies(self, copies: WholeBlockCopies, content_bytes: Sequence[int]) -> None:
        """Give the worker's half copies of whole blocks with all their layers, and the bytes of a
        block of each KV group.
        """


class KVConnectorBase_V1(_Hooks, ABC):  # noqa: N801 (the name that classes of one's own are written for)
    """Brings K/V of requests from elsewhere, and takes it there."""

    prefer_cross_layer_blocks = False

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        """vllm_config: the plan of the engine, with `kv_transfer_config`. kv_cache_config: the
        blocks (`views.KVCacheConfig`).
        """
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        """The half that this object is."""
        return self._role

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request that is preempted is still to be delivered."""
        return bool(self._kv_transfer_config.is_kv_producer)

    # The worker's half

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Set what the scheduler's half has told, for one step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Drop it after the step."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether a step is running."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None, "a step is running"
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of the metadata."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when what this step reads of a layer is loaded."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save what the metadata names of a layer. attn_metadata: None; what a
        step writes follows from the plan that `build_connector_meta` has read.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the blocks that are saved may be written again."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose sends, and whose loads, beside steps have ended, each once."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be loaded."""
        return set()

    def get_kv_connector_stats(self) -> Any:
        """Counts since the last time; None: none."""
        return None

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Events of the worker's half; None: none."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Facts for peers from the scheduler's half."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The message for the scheduler's half after this step."""
        return None

    # The scheduler's half

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Number of tokens after the cached ones that can be loaded (None: ask again in the next
        step), and whether beside steps. Asked again while the request waits: without side effects.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: ConnectorRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has blocks, `num_external_tokens` tokens of which are to be loaded. Called
        again, with 0, when it gets its row after a load beside steps.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: StepView) -> KVConnectorMetadata:
        """The message to the worker's half for this step; the next one begins anew."""

    def request_finished(
        self, request: ConnectorRequest, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Returns whether its blocks stay until `get_finished` says that
        they were sent, and the `kv_transfer_params` of its output.
        """
        return False, None

    def take_events(self) -> Iterable[AnyKVCacheEvent]:
        """Events for subscribers since the last time."""
        return ()

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although nothing is computed."""
        return False

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of ended requests are still read."""
        return False

    def get_finished_count(self) -> int | None:
        """Number of workers that report an end; None: all."""
        return None

    def reset_cache(self) -> bool | None:
        """Forget what is kept; False: it was not; None: nothing is kept."""
        return None

    # The class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout of K/V that the class needs; None: any."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether hooks of layers must be called between layers."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """An object for counts; None: the class has none."""
        return None

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        """An object that gives counts to Prometheus; None: the class has none."""
        return None

    # What Quire adds

    def join(self, worker_half: KVConnectorBase_V1) -> None:
        """Give the scheduler's half the worker's, which is in the same process."""
        metadata = worker_half.get_handshake_metadata()
        if metadata is not None:
            self.set_xfer_handshake_metadata({0: metadata})

    reads_steps = True
    """Whether the metadata follows from what a step computes, or from ended requests alone."""

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait until the worker's half has something to report, at most for `timeout_s`."""
        time.sleep(timeout_s / 4)

    def settle(self) -> bool:
        """End the worker's loads and sends at once: `get_finished` tells of them. False: they
        cannot be ended, and are waited for.
        """
        return False


KVConnectorBase = KVConnectorBaseType = KVConnectorBase_V1
