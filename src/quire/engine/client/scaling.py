"""Changes how many data-parallel cores there are while requests run; none of them is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from quire.engine.process.core_process import GRACE_S, CoreProcess
from quire.errors import InvalidParameter

LOOK_S = 0.05
START_S = 600.0


class ScalableClient(Protocol):
    """What is needed of a client of core processes (multiprocess.py)."""

    @property
    def engine_indices(self) -> Sequence[int]: ...
    def require_scalable(self) -> None: ...
    def start_new(self, engine_indices: Sequence[int]) -> None: ...
    def is_ready(self, engine_index: int) -> bool: ...
    def admit(self, engine_indices: Sequence[int]) -> None: ...
    def set_leaving(self, engine_indices: Sequence[int]) -> None: ...
    def num_requests(self, engine_index: int) -> int: ...
    def retire(self, engine_index: int) -> CoreProcess | None: ...


async def scale(client: ScalableClient, num_cores: int, drain_timeout_s: float) -> None:
    """Have so many cores. New ones get requests once they are ready; those with the highest indices
    go, when their requests have ended.

    Raises TimeoutError when they have not after `drain_timeout_s`, and what kept a new core from
    its start; then the cores are those that there were.
    """
    present = sorted(client.engine_indices)
    if num_cores != len(present):
        client.require_scalable()
    if num_cores < 1:
        raise InvalidParameter("new_data_parallel_size", num_cores, "it must be at least 1")
    if num_cores > len(present):
        await _grow(client, _unused(present, num_cores - len(present)))
    elif num_cores < len(present):
        await _shrink(client, present[num_cores:], drain_timeout_s)


def _unused(present: Sequence[int], count: int) -> list[int]:
    free = (index for index in range(len(present) + count) if index not in present)
    return [index for index, _ in zip(free, range(count), strict=False)]


async def _grow(client: ScalableClient, new: list[int]) -> None:
    deadline = time.monotonic() + START_S
    try:
        client.start_new(new)
        while not all(client.is_ready(index) for index in new):
            if time.monotonic() > deadline:
                raise TimeoutError(f"A new core was not ready within {START_S:g} s.")
            await asyncio.sleep(LOOK_S)
        client.admit(new)
    except BaseException:
        await _retire(client, new)
        raise


async def _shrink(client: ScalableClient, old: list[int], drain_timeout_s: float) -> None:
    deadline = time.monotonic() + drain_timeout_s
    client.set_leaving(old)
    try:
        while left := sum(client.num_requests(index) for index in old):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{left} requests of the cores that go were not finished within "
                    f"{drain_timeout_s:g} s; all cores stay."
                )
            await asyncio.sleep(LOOK_S)
        await _retire(client, old)
    finally:
        client.set_leaving([])


async def _retire(client: ScalableClient, engine_indices: list[int]) -> None:
    """End cores without holding up the event loop."""
    processes = [client.retire(index) for index in engine_indices]
    for process in processes:
        if process is not None:
            await asyncio.to_thread(process.end, GRACE_S)
