"""The feature of a core that tells others what its pool has: events for routers and indexers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from quire.distributed.kv_events import (
    GPU,
    AllBlocksCleared,
    AnyKVCacheEvent,
    BlockRemoved,
    BlockStored,
    EndpointTaken,
    EventPublisher,
    KVEventBatch,
)
from quire.engine.core.features import CoreFeature
from quire.engine.wire.messages import AdapterRef
from quire.errors import InvalidParameter
from quire.scheduling.request import Request
from quire.scheduling.scheduler import Scheduler
from quire.step.transfers import CPU, BlockKey
from quire.tiers.kv_events_config import NAME, KVEventsPlan

_KINDS = {"full": "full_attention", "sliding": "sliding_window", "state": "mamba"}
"""Kinds of KV groups whose blocks prompts are found by -> what readers of events call them."""


class KVEvents(CoreFeature):
    """Publishes the pool's changes, a batch a step; consecutive blocks are one event."""

    def __init__(
        self,
        scheduler: Scheduler,
        publisher: EventPublisher,
        *,
        rank: int = 0,
        is_cleared: bool = False,
        adapter_of: Callable[[Request], AdapterRef | None] | None = None,
        tier_contents: Callable[[], Iterable[tuple[str, BlockKey]]] = tuple,
        media: Collection[str] = (CPU,),
        of_connector: Callable[[], Iterable[AnyKVCacheEvent]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`rank` is that of the core among its data-parallel ones; `is_cleared`: another core
        published before, whose contents are lost. `adapter_of` gives the name by which a request
        calls its adapter; `tier_contents`, the media and the contents of the tier, of which events
        tell those of `media`. `of_connector` takes a connector's own events.
        """
        self._tier_contents, self._media, self._of_connector = tier_contents, media, of_connector
        self._block_size = scheduler.memory.key_size
        self._groups = scheduler.config.groups
        self._publisher = publisher
        self._rank, self._adapter_of, self._clock = rank, adapter_of, clock
        self._events: list[AnyKVCacheEvent] = []
        self._last: Request | None = None
        """The request of the last event, if blocks of it are stored there."""
        if is_cleared:
            self.cleared()
            self.updated()
        scheduler.memory.pool.listeners.append(self)

    # the pool

    def published(self, block: int, key: BlockKey, request: Request, num_tokens: int) -> None:
        spec = self._groups[key[1]]
        if spec.kind not in _KINDS:
            return
        size = self._block_size
        if spec.kind != "state" and spec.block_size is not None:
            size = spec.block_size
        start = num_tokens - size
        parent = _hash(request.keys[start // self._block_size - 1]) if start else None
        event = self._events[-1] if request is self._last else None
        if (
            not isinstance(event, BlockStored)
            or event.group_idx != key[1]
            or event.block_hashes[-1] != parent
        ):
            adapter = None
            if request.adapter and self._adapter_of is not None:
                adapter = self._adapter_of(request)
            event = BlockStored(
                [],
                parent,
                [],
                size,
                None if adapter is None else adapter.id,
                GPU,
                None if adapter is None else adapter.name,
                [],
                group_idx=key[1],
                kv_cache_spec_kind=_KINDS[spec.kind],
                kv_cache_spec_sliding_window=spec.window,
            )
            self._events.append(event)
            self._last = request
        event.block_hashes.append(_hash(key[0]))
        event.token_ids += request.token_ids(start, num_tokens)
        assert event.extra_keys is not None, "an event of the pool says what is in its hashes"
        event.extra_keys.append(_extra_keys(request, start, num_tokens, event.lora_name))

    def evicted(self, block: int, key: BlockKey) -> None:
        if self._groups[key[1]].kind in _KINDS:
            self._remove(GPU, key)

    def cleared(self) -> None:
        self._add(AllBlocksCleared())
        for medium, key in self._tier_contents():  # which are there all the same
            self.tier_changed(medium, key, is_there=True)

    def released(self, block: int) -> None:
        """A block without references is still findable."""

    # the tier

    def tier_changed(self, medium: str, key: BlockKey, *, is_there: bool) -> None:
        if medium not in self._media or self._groups[key[1]].kind not in _KINDS:
            return
        if not is_there:
            self._remove(medium, key)
            return
        event = self._events[-1] if self._events and self._last is None else None
        place = medium, key[1]
        if not isinstance(event, BlockStored) or (event.medium, event.group_idx) != place:
            event = BlockStored([], None, [], 0, None, medium, None, group_idx=key[1])
            self._add(event)
        event.block_hashes.append(_hash(key[0]))

    def _remove(self, medium: str, key: BlockKey) -> None:
        event = self._events[-1] if self._events else None
        place = medium, key[1]
        if not isinstance(event, BlockRemoved) or (event.medium, event.group_idx) != place:
            event = BlockRemoved([], medium, group_idx=key[1])
            self._add(event)
        event.block_hashes.append(_hash(key[0]))

    # the core

    def updated(self) -> None:
        for event in self._of_connector():
            self._add(event)
        if self._events:
            events, self._events, self._last = self._events, [], None
            self._publisher.publish(KVEventBatch(self._clock(), events, self._rank))

    def is_busy(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        self.updated()
        self._publisher.close()

    def _add(self, event: AnyKVCacheEvent) -> None:
        self._events.append(event)
        self._last = None


def open_publisher(plan: KVEventsPlan) -> EventPublisher:
    """Start publishing as a plan says. Raises InvalidParameter for an endpoint that is taken."""
    config = plan.config
    try:
        publisher = EventPublisher(
            plan.endpoint,
            plan.replay_endpoint,
            topic=config.topic,
            first=plan.first,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
        )
    except EndpointTaken as error:
        name, allowed = f"{NAME}[{error.name!r}]", f"it cannot be opened: {error.reason}"
        hint = "Give another one, or end the process that has it."
        raise InvalidParameter(name, error.endpoint, allowed, hint) from error
    publisher.start()
    return publisher


def _hash(key: bytes) -> int:
    """The hash of a key in events: its low 64 bits."""
    return int.from_bytes(key[-8:], "big")


def _extra_keys(
    request: Request, start: int, end: int, adapter: str | None
) -> list[str | tuple[str, int]] | None:
    """Parts of a block's hash besides its tokens: adapter, media with their places, salt."""
    found: list[str | tuple[str, int]] = [] if adapter is None else [adapter]
    for span in request.embedded:
        if span.start < end and start < span.end:
            found.append((span.digest.hex(), span.start - start))
    if start == 0 and request.cache_salt is not None:
        found.append(request.cache_salt)
    return found or None
