"""Copies of whole blocks between KV memory and the host, in a thread of their own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.hardware.native import find_native
from quire.runner.devices.cuda import device_failures
from quire.runner.kv_cache import KVCache
from quire.tiers.checksum import content_sum


class Mark(Protocol):
    """A place in the queue of a device's work."""

    def wait(self) -> None:
        """Wait for all work queued before it."""
        ...


class BlockCopies(Protocol):
    """Copies a block of a KV group to host memory, or from there. A copy has ended when the method
    returns; it returns the checksum of the content, as `content_sum` makes it of the slot.
    """

    def mark(self) -> Mark | None:
        """Mark the work that steps have queued so far, in their thread; None: it is done."""
        ...

    def read(self, group: int, block: int, slot: Tensor) -> bytes:
        """Copy a block to `slot`, in host memory."""
        ...

    def write(self, group: int, block: int, slot: Tensor) -> bytes:
        """Copy `slot` into a block."""
        ...


class HostCopies:
    """The KV memory is the host's own. Native code copies and sums in one pass, while the
    interpreter does something else.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self._native, _ = find_native()

    def mark(self) -> Mark | None:
        return None

    @torch.inference_mode()
    def read(self, group: int, block: int, slot: Tensor) -> bytes:
        places = None if self._native is None else self._kv_cache.places_of(group, block)
        if self._native is None or places is None:
            self._kv_cache.read_block(group, block, slot)
            return _sum_of(slot, self._kv_cache.content_bytes(group))
        found: bytes = self._native.read_block(places.starts, places.sizes, slot.data_ptr())
        return found

    @torch.inference_mode()
    def write(self, group: int, block: int, slot: Tensor) -> bytes:
        places = None if self._native is None else self._kv_cache.places_of(group, block)
        if self._native is None or places is None:
            self._kv_cache.write_block(group, block, slot)
            return _sum_of(slot, self._kv_cache.content_bytes(group))
        found: bytes = self._native.write_block(slot.data_ptr(), places.starts, places.sizes)
        return found


class CudaCopies:
    """The KV memory is a GPU's: copies have a stream, and go through one buffer on the device, so
    that there is a single one between it and the host for each block.
    """

    def __init__(self, kv_cache: KVCache, device: torch.device) -> None:
        self._kv_cache = kv_cache
        self._stream = torch.cuda.Stream(device)
        groups = range(len(kv_cache.pool.groups))
        largest = max(map(kv_cache.content_bytes, groups), default=0)
        self._buffer = torch.zeros(largest, dtype=torch.uint8, device=device)

    def mark(self) -> Mark | None:
        event = torch.cuda.Event(blocking=True)
        with device_failures():
            event.record()
        return _CudaMark(event)

    @torch.inference_mode()
    def read(self, group: int, block: int, slot: Tensor) -> bytes:
        size = self._kv_cache.content_bytes(group)
        with device_failures(), torch.cuda.stream(self._stream):
            self._kv_cache.read_block(group, block, self._buffer)
            slot[:size].copy_(self._buffer[:size], non_blocking=True)
            self._stream.synchronize()
        return _sum_of(slot, size)

    @torch.inference_mode()
    def write(self, group: int, block: int, slot: Tensor) -> bytes:
        size = self._kv_cache.content_bytes(group)
        with device_failures(), torch.cuda.stream(self._stream):
            self._buffer[:size].copy_(slot[:size], non_blocking=True)
            self._kv_cache.write_block(group, block, self._buffer)
            self._stream.synchronize()
        return _sum_of(slot, size)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        with device_failures():
            self._event.synchronize()


def _sum_of(slot: Tensor, size: int) -> bytes:
    return content_sum(slot[:size].numpy())
