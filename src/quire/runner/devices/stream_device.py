"""A device with a queue of its own that runs while the host continues: any with a `Driver`.

Only `Fetched.wait` blocks, and `begin` when the host is further ahead than the arena has buffers
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.runner.devices.arena import Arena, Driver, Event
from quire.runner.devices.device import Array, Fetched


class StreamDevice:
    """Small arrays through an arena, results through pinned memory and events."""

    def __init__(self, driver: Driver, *, arena_bytes: int) -> None:
        self.torch = driver.torch
        self._driver = driver
        self._arena = Arena(driver, arena_bytes)
        self._writes: list[_Write] = []

    def places(self, arrays: Sequence[Array]) -> list[Tensor]:
        return self._arena.places(list(arrays))

    def begin(self, arrays: Sequence[Array]) -> None:
        self._arena.begin()
        for array in arrays:
            self._arena.append(array)

    def stage(self, array: Array) -> Tensor:
        return self._arena.append(array)

    def flush(self) -> None:
        """Send the staged arrays, then update each table by one scatter."""
        writes, self._writes = self._writes, []
        staged = [(t, self.stage(at), self.stage(new)) for t, at, new in _scatters(writes)]
        self._arena.flush()
        for table, places, values in staged:
            table.view(-1).index_copy_(0, places, values)

    def send(self, array: Array) -> Tensor:
        return self._arena.apart(array)

    def table(self, host: Array) -> Tensor:
        return torch.from_numpy(host).to(self.torch, copy=True)

    def write(self, table: Tensor, row: int, first: int, values: Sequence[int]) -> None:
        start = row * table.shape[1] + first
        new = np.array(values, dtype=np.int32)
        self._writes.append(_Write(table, row, np.arange(start, start + len(new)), new))

    def take(self, table: Tensor, rows: Tensor, columns: Tensor, into: Tensor) -> None:
        into.copy_(table[rows, columns])

    def put(self, table: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
        table.index_put_((rows, columns), values.to(table.dtype))

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        held = []
        for tensor in tensors:
            source = tensor.contiguous()
            memory = self._driver.pinned(source.nbytes)
            target = memory.view(source.dtype).view(source.shape)
            self._driver.copy(target, source)
            held.append(target)
        return _Coming(held, self._driver.mark())

    def known(self, tensor: Tensor) -> Tensor | None:
        return None

    def return_free_memory(self) -> None:
        self._driver.return_free_memory()


@dataclass(frozen=True, slots=True)
class _Write:
    """`values` [n] int32 for a row of a table [N, W] int32, at places counted flat [n] int64."""

    table: Tensor
    row: int
    places: Array
    values: Array


class _Coming:
    """Values that are valid once the event has happened."""

    def __init__(self, values: list[Tensor], event: Event) -> None:
        self._values = values
        self._event = event

    def wait(self) -> list[Tensor]:
        self._event.wait()
        return self._values


def _scatters(writes: Sequence[_Write]) -> list[tuple[Tensor, Array, Array]]:
    """Return one scatter (places, values) for each table; if a place is written twice, the later
    value wins.
    """
    tables: dict[int, list[_Write]] = {}
    for write in writes:
        tables.setdefault(id(write.table), []).append(write)
    return [(same[0].table, *_joined(same)) for same in tables.values()]


def _joined(writes: Sequence[_Write]) -> tuple[Array, Array]:
    places = np.concatenate([write.places for write in writes])
    values = np.concatenate([write.values for write in writes])
    if len({write.row for write in writes}) == len(writes):
        return places, values
    _, last = np.unique(places[::-1], return_index=True)  # a scatter has no order
    kept = len(places) - 1 - last
    return places[kept], values[kept]
