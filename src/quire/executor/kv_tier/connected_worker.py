"""A worker's side of a connector of K/V: the calls of its hooks around each step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.distributed.kv_connector.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from quire.distributed.kv_connector.multi import MultiConnector
from quire.distributed.kv_connector.views import (
    ForwardContext,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorOutput,
    LayerView,
)
from quire.errors import InvalidParameter, NotBuiltYet
from quire.executor.kv_tier.root import RootParts, kept_digests
from quire.executor.platform import Platform
from quire.plugins import class_of_connector
from quire.runner.devices.block_copies import BlockCopies, CudaCopies, HostCopies
from quire.runner.kv_cache import KVCache
from quire.tiers.kv_transfer_config import EXTRA, MULTI, NAME, KVTransferConfig

logger = logging.getLogger(__name__)


class Root:
    """The name of all that K/V depends on apart from the keys of blocks, made when it is asked for
    first; None once weights have changed.
    """

    def __init__(self, make: Callable[[], str | None]) -> None:
        """`make` reads the files of the model where their digests are not known yet."""
        self._make = make
        self._lock = threading.Lock()
        self._name: str | None = None
        self._is_known = False

    def __call__(self) -> str | None:
        with self._lock:
            if not self._is_known:
                # also after a failure, which the next call would only repeat
                self._is_known = True
                try:
                    self._name = self._make()
                except OSError as error:
                    logger.warning("K/V is not exchanged: %s", error)
            return self._name

    def forget(self) -> None:
        """The weights are not those of the files any more."""
        with self._lock:
            self._name, self._is_known = None, True


class ConnectedWorker:
    """Calls a connector's worker half; one step at a time."""

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        kv_cache: KVCache,
        copies: BlockCopies,
        root: Root,
    ) -> None:
        self._connector = self.connector = connector
        self._kv_cache, self._root = kv_cache, root
        groups = range(len(kv_cache.pool.groups))
        connector.bind_root(root)
        connector.bind_block_copies(copies, [*map(kv_cache.content_bytes, groups)])
        self.register()

    def register(self) -> None:
        """Give the connector the K/V memory, which was allocated."""
        self._layers = _layers(self._kv_cache)
        self._connector.register_kv_caches(self._layers)
        self._context = ForwardContext({n: LayerView(t) for n, t in self._layers.items()})

    @torch.inference_mode()
    def begin(self, metadata: KVConnectorMetadata) -> set[int]:
        """Load what a step reads; returns the blocks that could not be filled."""
        connector = self._connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(self._context)
        # all layers before the step: a recorded step calls no hooks between its layers
        for name in self._layers:
            connector.wait_for_layer_load(name)
        return connector.get_block_ids_with_load_errors()

    @torch.inference_mode()
    def end(self, finished: set[str], *, has_computed: bool) -> KVConnectorOutput:
        """Save what a step has computed, and report. `finished` are the requests that have
        ended.
        """
        connector = self._connector
        if has_computed:
            for name, tensor in self._layers.items():
                connector.save_kv_layer(name, tensor, None)
            connector.wait_for_save()
        sent, loaded = connector.get_finished(finished)
        output = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=loaded,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output

    def forget_root(self) -> None:
        """The weights are not those of the files any more."""
        self._root.forget()

    def settle(self) -> bool:
        """End loads and sends; see `KVConnectorBase_V1.settle`."""
        return self._connector.settle()

    def wait(self, timeout_s: float) -> None:
        """Wait for something to report, at most for `timeout_s`."""
        self._connector.wait_for_news(timeout_s)

    def close(self) -> None:
        self._connector.shutdown()


def make_connector(
    vllm_config: Any, role: KVConnectorRole, blocks: KVCacheConfig
) -> KVConnectorBase_V1:
    """A half of the connector of a plan. Raises InvalidParameter for a class that cannot be used,
    NotBuiltYet for one that cannot serve the model.
    """
    config: KVTransferConfig = vllm_config.kv_transfer_config
    if config.kv_connector == MULTI:
        halves = [
            make_connector(OfConnector(vllm_config, c), role, blocks) for c in config.children
        ]
        return MultiConnector(vllm_config, role, blocks, halves)
    kind: type[KVConnectorBase_V1] = class_of_connector(
        *(NAME, "kv_connector", config.kv_connector_module_path, config.kv_connector),
        KVConnectorBase_V1,
    )
    if len(blocks.kv_cache_groups) > 1 and not issubclass(kind, SupportsHMA):
        value = f"{config.kv_connector} with {len(blocks.kv_cache_groups)} KV groups"
        hint = (
            "Layers of the model remember in several ways, and the class knows one list of blocks."
        )
        raise NotBuiltYet(f"{NAME}['kv_connector']", value, hint)
    layout = kind.get_required_kvcache_layout(vllm_config)
    if layout is not None:
        value = f"{config.kv_connector}, which needs the layout {layout}"
        raise NotBuiltYet(f"{NAME}['kv_connector']", value, "K/V is given as it lies in memory.")
    if kind.requires_piecewise_for_cudagraph(config.kv_connector_extra_config):
        value = f"{config.kv_connector}, whose hooks are called between layers"
        hint = f"Change {EXTRA} so that it moves all layers together."
        raise NotBuiltYet(f"{NAME}['kv_connector']", value, hint)
    try:
        return kind(vllm_config, role, blocks)
    except TypeError as error:
        allowed = f"its class takes (vllm_config, role, kv_cache_config): {error}"
        raise InvalidParameter(f"{NAME}['kv_connector']", config.kv_connector, allowed) from error


class OfConnector:
    """A plan with the settings of one connector of several."""

    def __init__(self, plan: Any, config: KVTransferConfig) -> None:
        self._plan, self.kv_transfer_config = plan, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def blocks_of(kv_cache: KVCache) -> KVCacheConfig:
    """The blocks as connectors see them."""
    names = _names(kv_cache)
    return KVCacheConfig(
        kv_cache.num_blocks,
        tuple(
            KVCacheGroup(tuple(names[layer] for layer in group.layers), group.block_size)
            for group in kv_cache.pool.groups
            if group.kind != "none"
        ),
    )


def _names(kv_cache: KVCache) -> dict[int, str]:
    """The names of layers, in one count with those of draft networks."""
    return {layer: f"model.layers.{layer}.self_attn.attn" for layer in range(len(kv_cache.layers))}


def _layers(kv_cache: KVCache) -> dict[str, Tensor]:
    """The K/V memory of each layer [N, ...]; further parts of a layer, such as scales, have names
    that end in their number.
    """
    found = {}
    for layer, name in _names(kv_cache).items():
        memory = kv_cache.layers[layer]
        for number, part in enumerate(memory.parts if memory is not None else ()):
            found[f"{name}.{number}" if number else name] = part
    return found


def open_connector(
    platform: Platform, kv_cache: KVCache, parts: RootParts, plan: Any
) -> tuple[KVConnectorBase_V1, ConnectedWorker]:
    """Make both halves of the connector of a plan: the scheduler's, and the worker's with its K/V
    memory. `parts` are those of its root, the name of its K/V.
    """
    blocks = blocks_of(kv_cache)
    first = make_connector(plan, KVConnectorRole.SCHEDULER, blocks)
    second = make_connector(plan, KVConnectorRole.WORKER, blocks)
    copies: BlockCopies = HostCopies(kv_cache)
    if platform.driver is not None:
        copies = CudaCopies(kv_cache, platform.device.torch)
    root = Root(lambda: parts.name(kept_digests()))
    first.bind_root(root)
    first.join(second)
    return first, ConnectedWorker(second, kv_cache, copies, root)
