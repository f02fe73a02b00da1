"""A device for tests whose copies are late: it runs behind the host by a random distance.

Arithmetic happens at once, on the CPU; what is late is everything that a host may get wrong about a
device. Memory that a copy reads must stay as it is until the copy is over, and memory that a result
goes to holds poison until then. Time is the number of calls: nothing sleeps, and a seed is a life.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.runner.devices.arena import Event

_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class _Copy:
    """A queued copy; `values` are the source's when it was queued."""

    number: int
    target: Tensor
    source: Tensor
    values: Tensor
    is_result: bool


class LateDriver:
    """A `Driver` on CPU tensors. `num_waits` counts how often the host had to wait."""

    def __init__(self, seed: int, *, most_behind: int = 12) -> None:
        """most_behind: copies that may be under way at once."""
        self.torch = torch.device("cpu")
        self.num_waits = 0
        self._random = random.Random(seed)
        self._most_behind = most_behind
        self._queue: deque[_Copy] = deque()
        self._num_queued = 0
        self._pinned: set[int] = set()
        self._kept: list[Tensor] = []

    def pinned(self, num_bytes: int) -> Tensor:
        memory = torch.full((num_bytes,), _POISON, dtype=torch.uint8)
        self._pinned.add(memory.untyped_storage().data_ptr())
        self._kept.append(memory)  # so that no other memory gets its address
        return memory

    def pin(self, memory: Tensor) -> None:
        self._pinned.add(memory.untyped_storage().data_ptr())
        self._kept.append(memory)

    def copy(self, target: Tensor, source: Tensor) -> None:
        is_result = self.is_pinned(target)
        assert is_result or self.is_pinned(source), "one side is pinned"
        values = source.clone()
        if not is_result:
            target.copy_(values)  # whatever reads it is queued later
        self._queue.append(_Copy(self._num_queued, target, source, values, is_result))
        self._num_queued += 1
        while len(self._queue) > self._random.randint(0, self._most_behind):
            self._finish_one()

    def mark(self) -> Event:
        return _Mark(self, self._num_queued)

    def copy_queue(self) -> LateCopyQueue:
        return LateCopyQueue(self)

    def return_free_memory(self) -> None:
        """Nothing may be in flight."""
        assert not self._queue

    @torch.inference_mode()
    def finish_until(self, number: int) -> None:
        """Let the copies before `number` happen."""
        if self._queue and self._queue[0].number < number:
            self.num_waits += 1
        while self._queue and self._queue[0].number < number:
            self._finish_one()

    def _finish_one(self) -> None:
        copy = self._queue.popleft()
        if copy.is_result:
            copy.target.copy_(copy.values)
        else:
            assert same_bits(copy.source, copy.values), "the host changed what a copy still read"

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether `pinned` has made its memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned


class _Mark:
    def __init__(self, driver: LateDriver, number: int) -> None:
        self._driver = driver
        self._number = number

    def wait(self) -> None:
        self._driver.finish_until(self._number)


class LateCopyQueue:
    """Copies beside the other work: from `start` to `join` their targets hold poison, since a copy
    may happen at any time between.
    """

    def __init__(self, driver: LateDriver) -> None:
        self.driver = driver
        self.num_started = 0

    @torch.inference_mode()
    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> _LateArrival:
        self.num_started += 1
        for target, source in copies:
            assert self.driver.is_pinned(source) and not self.driver.is_pinned(target)
            assert (target.shape, target.dtype) == (source.shape, source.dtype)
            target.view(-1).view(torch.uint8).fill_(_POISON)
        return _LateArrival([(target, source, source.clone()) for target, source in copies])


class _LateArrival:
    def __init__(self, copies: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._copies = copies

    @torch.inference_mode()
    def join(self) -> None:
        for target, source, values in self._copies:
            assert same_bits(source, values), "the host changed what a copy still read"
            target.copy_(values)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one shape and type are equal bit by bit."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
