"""One pinned buffer for the small arrays of a step, and one copy that sends them to the device.

A copy costs the host some microseconds however small it is, and one from memory that is not pinned
waits for the device. So everything that the host sends for a step (positions, slots,
lengths, sampling settings, changes of tables) is appended here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.runner.devices.copy_queue import CopyQueue
from quire.runner.devices.device import Array

ALIGNMENT = 256
"""Alignment of arrays in bytes, as required by the widest loads of kernels."""


class Event(Protocol):
    """A mark in the queue of the device's work."""

    def wait(self) -> None:
        """Block until all work queued before the mark is done. Raises EngineDeadError."""
        ...


class Driver(Protocol):
    """The interface of a device with its own queue; runner/devices/cuda.py implements it."""

    torch: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory [num_bytes] uint8 that the device can copy from and to directly."""
        ...

    def pin(self, memory: Tensor) -> None:
        """Let the device copy from and to host memory directly that something else allocated and
        that stays mapped.
        """
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between pinned and device memory. Raises EngineDeadError."""
        ...

    def mark(self) -> Event:
        """Return an event after all work queued so far."""
        ...

    def copy_queue(self) -> CopyQueue:
        """Open a queue for copies beside the work that is queued otherwise."""
        ...

    def return_free_memory(self) -> None:
        """Return memory cached by the allocator to the device."""
        ...


@dataclass(slots=True)
class _HostBuffer:
    """Pinned bytes of one step; `copied` None: no copy reads them."""

    memory: Tensor
    bytes: Array
    copied: Event | None = None
    held: list[Tensor] = field(default_factory=list)


class Arena:
    """Arrays of a step, appended in order.

    The device has one buffer: work is done in the order in which it is queued, so the copy for a
    step comes after the last read of the step before. The host runs ahead, so it has `depth` + 1
    buffers and fills one only when its last copy is complete. Arrays that do not fit get memory of
    their own.
    """

    def __init__(self, driver: Driver, num_bytes: int, *, depth: int = 2) -> None:
        self._driver = driver
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=driver.torch)
        memories = [driver.pinned(num_bytes) for _ in range(depth + 1)]
        self._buffers = [_HostBuffer(memory, memory.numpy()) for memory in memories]
        self._turn = 0
        self._used = self._sent = 0

    def begin(self) -> None:
        """Begin a new step; the tensors of the last one are no longer valid."""
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer.copied is not None:
            buffer.copied.wait()
            buffer.copied = None
        buffer.held.clear()
        self._used = self._sent = 0

    def append(self, array: Array) -> Tensor:
        """Append an array; return its tensor on the device, valid once flushed."""
        start = self._used
        end = start + array.nbytes
        if end > len(self._device):
            return self.apart(array)
        self._buffers[self._turn].bytes[start:end] = _bytes(array)
        self._used = _aligned(end)
        return self._view(start, array)

    def places(self, arrays: list[Array]) -> list[Tensor]:
        """Return the tensors of arrays of these shapes when they are the first of a step."""
        found, start = [], 0
        for array in arrays:
            assert start + array.nbytes <= len(self._device), "the arena is too small for a step"
            found.append(self._view(start, array))
            start = _aligned(start + array.nbytes)
        return found

    def flush(self) -> None:
        """Copy what was appended since the last time."""
        if self._used == self._sent:
            return
        buffer, end = self._buffers[self._turn], min(self._used, len(self._device))
        self._driver.copy(self._device[self._sent : end], buffer.memory[self._sent : end])
        buffer.copied = self._driver.mark()
        self._sent = self._used

    def apart(self, array: Array) -> Tensor:
        """Send the array at once, to memory of its own on the device."""
        buffer = self._buffers[self._turn]
        source = self._driver.pinned(array.nbytes)
        source.numpy()[:] = _bytes(array)
        target = torch.empty(array.nbytes, dtype=torch.uint8, device=self._driver.torch)
        self._driver.copy(target, source)
        # the copy may still read it when this returns
        buffer.held.append(source)
        buffer.copied = self._driver.mark()
        return target.view(_dtype(array)).view(array.shape)

    def _view(self, start: int, array: Array) -> Tensor:
        part = self._device[start : start + array.nbytes]
        return part.view(_dtype(array)).view(array.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
