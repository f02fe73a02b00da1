"""Several connectors as one: the first that has something loads it, and all save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from quire.distributed.kv_connector.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    WholeBlockCopies,
)
from quire.distributed.kv_connector.views import (
    ConnectorRequest,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorOutput,
    StepView,
)
from quire.distributed.kv_events import AnyKVCacheEvent


class _OfAll(KVConnectorMetadata, KVConnectorWorkerMetadata):
    """The messages of all connectors; `sends`: requests that several of them send -> how many."""

    def __init__(self, each: Sequence[Any], sends: dict[str, int] | None = None) -> None:
        self.each, self.sends = each, sends or {}


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """Asks its connectors in order. Blocks of a request stay until all are done with them."""

    def __init__(
        self,
        vllm_config: Any,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        connectors: Sequence[KVConnectorBase_V1],
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._connectors = connectors
        self._sends: dict[str, int] = {}
        """Requests whose blocks several connectors read -> how many still do."""
        self._asked: dict[str, int] = {}
        """Requests -> the connector that has offered tokens."""

    # The worker's half

    def bind_root(self, root: Callable[[], str | None]) -> None:
        for each in self._connectors:
            each.bind_root(root)

    def bind_block_copies(self, copies: WholeBlockCopies, content_bytes: Sequence[int]) -> None:
        for each in self._connectors:
            each.bind_block_copies(copies, content_bytes)

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        for each in self._connectors:
            each.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, _OfAll), "its own metadata"
        self._sends |= connector_metadata.sends
        for each, own in zip(self._connectors, connector_metadata.each, strict=True):
            each.bind_connector_metadata(own)

    def clear_connector_metadata(self) -> None:
        for each in self._connectors:
            each.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, _OfAll), "its own metadata"
        for each, own in zip(self._connectors, kv_connector_metadata.each, strict=True):
            each.handle_preemptions(own)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for each in self._connectors:
            each.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for each in self._connectors:
            each.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for each in self._connectors:
            each.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for each in self._connectors:
            each.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent: set[str] = set()
        loaded: set[str] = set()
        for each in self._connectors:
            sent_by_one, loaded_by_one = each.get_finished(finished_req_ids)
            loaded |= loaded_by_one or set()
            for name in sent_by_one or ():
                left = self._sends.pop(name, 1) - 1
                if left:
                    self._sends[name] = left
                else:
                    sent.add(name)
        return sent, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {bad for each in self._connectors for bad in each.get_block_ids_with_load_errors()}

    def get_kv_connector_stats(self) -> Any:
        found = [each.get_kv_connector_stats() for each in self._connectors]
        return {name: count for stats in found if stats for name, count in stats.items()}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        found = [each.build_connector_worker_meta() for each in self._connectors]
        return _OfAll(found) if any(meta is not None for meta in found) else None

    def shutdown(self) -> None:
        for each in self._connectors:
            each.shutdown()

    def settle(self) -> bool:
        # a list, so that each of them is asked whatever the others say
        have_ended = [each.settle() for each in self._connectors]
        return all(have_ended)

    # The scheduler's half

    def join(self, worker_half: KVConnectorBase_V1) -> None:
        assert isinstance(worker_half, MultiConnector), "the same class"
        for each, other in zip(self._connectors, worker_half._connectors, strict=True):
            each.join(other)

    @property
    def reads_steps(self) -> bool:  # type: ignore[override]
        return any(each.reads_steps for each in self._connectors)

    def on_new_request(self, request: ConnectorRequest) -> None:
        for each in self._connectors:
            each.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        for number, each in enumerate(self._connectors):
            count, is_beside = each.get_num_new_matched_tokens(request, num_computed_tokens)
            if count is None or count > 0:
                self._asked[request.request_id] = number
                return count, is_beside
        return 0, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        chosen = self._asked.pop(request.request_id, None) if num_external_tokens else None
        for number, each in enumerate(self._connectors):
            if number == chosen:
                each.update_state_after_alloc(request, blocks, num_external_tokens)
            else:
                tables = blocks.get_block_ids() or ()
                each.update_state_after_alloc(request, KVCacheBlocks(tables), 0)

    def build_connector_meta(self, scheduler_output: StepView) -> KVConnectorMetadata:
        sends, self._sends = self._sends, {}
        each = [each.build_connector_meta(scheduler_output) for each in self._connectors]
        return _OfAll(each, sends)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metas = connector_output.kv_connector_worker_meta
        for number, each in enumerate(self._connectors):
            connector_output.kv_connector_worker_meta = (
                None if metas is None else metas.each[number]
            )
            each.update_connector_output(connector_output)
        connector_output.kv_connector_worker_meta = metas

    def request_finished(
        self, request: ConnectorRequest, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: ConnectorRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._asked.pop(request.request_id, None)
        count, params = 0, None
        for each in self._connectors:
            keeps, own = finished(each, request, block_ids)
            count += keeps
            if own is not None:
                if given_twice := set(own) & set(params or ()):
                    text = f"Two connectors give the kv_transfer_params {sorted(given_twice)}."
                    raise RuntimeError(text)
                params = {**(params or {}), **own}
        if count > 1:
            self._sends[request.request_id] = count
        return count > 0, params

    def take_events(self) -> Iterable[AnyKVCacheEvent]:
        for each in self._connectors:
            yield from each.take_events()

    def has_pending_push_work(self) -> bool:
        return any(each.has_pending_push_work() for each in self._connectors)

    def reset_cache(self) -> bool | None:
        # a list, as in `settle`
        found = [each.reset_cache() for each in self._connectors]
        known = [each for each in found if each is not None]
        return all(known) if known else None


def finished(
    connector: KVConnectorBase_V1, request: ConnectorRequest, block_ids: tuple[list[int], ...]
) -> tuple[bool, dict[str, Any] | None]:
    """Tell a connector that a request has ended, in the way that it knows."""
    if isinstance(connector, SupportsHMA):
        return connector.request_finished_all_groups(request, block_ids)
    return connector.request_finished(request, block_ids[0] if block_ids else [])
