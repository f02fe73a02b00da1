"""Changes the number of data-parallel cores while requests run; none of them is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from quire.engine.client.remote_cores import RemoteCores
from quire.errors import EngineError, InvalidParameter
from quire.processes.child_process import GRACE_S

POLL_S = 0.05
START_S = 600.0


async def scale(cores: RemoteCores, num_cores: int, drain_timeout_s: float) -> None:
    """Start or end cores until there are `num_cores`. New ones get requests once they are ready;
    those with the highest indices leave when their requests have ended.

    Raises TimeoutError when they have not after `drain_timeout_s` seconds, or what kept a new core
    from starting; then the cores are the same as before. Raises EngineError while another such
    change goes on.
    """
    if cores.is_scaling:
        raise EngineError("The number of cores is changing: wait for that.")
    cores.is_scaling = True
    try:
        await _scale(cores, num_cores, drain_timeout_s)
    finally:
        cores.is_scaling = False


async def _scale(cores: RemoteCores, num_cores: int, drain_timeout_s: float) -> None:
    present = sorted(cores.engine_indices)
    if num_cores != len(present):
        cores.require_scalable()
    if num_cores < 1:
        raise InvalidParameter("new_data_parallel_size", num_cores, "it must be at least 1")
    if num_cores > len(present):
        unused = (index for index in range(num_cores) if index not in present)
        await _grow(cores, list(unused)[: num_cores - len(present)])
    elif num_cores < len(present):
        await _shrink(cores, present[num_cores:], drain_timeout_s)


async def _grow(cores: RemoteCores, new: Sequence[int]) -> None:
    deadline = time.monotonic() + START_S
    try:
        cores.start_new(new)
        while not all(cores.is_ready(index) for index in new):
            if time.monotonic() > deadline:
                raise TimeoutError(f"A new core was not ready within {START_S:g} s.")
            await asyncio.sleep(POLL_S)
        cores.admit(new)
    except BaseException:
        await _retire(cores, new)
        raise


async def _shrink(cores: RemoteCores, old: Sequence[int], drain_timeout_s: float) -> None:
    deadline = time.monotonic() + drain_timeout_s
    cores.leaving = set(old)
    try:
        while left := sum(cores.num_requests(index) for index in old):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{left} requests of the cores to be removed did not finish within "
                    f"{drain_timeout_s:g} s; all cores stay."
                )
            await asyncio.sleep(POLL_S)
        await _retire(cores, old)
    finally:
        cores.leaving = set()


async def _retire(cores: RemoteCores, engine_indices: Sequence[int]) -> None:
    # all are told before one is waited for, so that they end at the same time
    processes = [cores.retire(index) for index in engine_indices]
    for process in processes:
        if process is not None:
            await asyncio.to_thread(process.end, GRACE_S)
