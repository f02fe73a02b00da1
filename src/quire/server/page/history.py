"""Takes the samples of the dashboard, whether or not somebody looks at it."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from quire.errors import EngineError
from quire.hardware.memory_use import resident_bytes
from quire.hardware.nvidia import gpu_bytes_in_use
from quire.server.context import Server

logger = logging.getLogger(__name__)


async def keep_history(server: Server, *, has_gpu: bool) -> None:
    """Add a sample to the history every period until cancelled; `has_gpu`: the engine has one."""
    # One of several API servers is a child of the process that started the engine's.
    root = os.getppid() if server.in_flight.has_neighbours else os.getpid()
    while True:
        try:
            await server.engine.refresh_metrics()
            # Asking the system for all processes takes milliseconds.
            memory = await asyncio.to_thread(_memory_in_use, root, has_gpu)
            server.history.add(time.time(), server.engine.get_metrics(), memory)
        except EngineError as error:
            logger.debug("There is no sample for the dashboard: %s", error)
        await asyncio.sleep(server.history.period_s)


def _memory_in_use(root: int, has_gpu: bool) -> dict[str, float]:
    memory: dict[str, float] = {"process_bytes": resident_bytes(root)}
    in_use = gpu_bytes_in_use() if has_gpu else None
    if in_use is not None:
        memory["gpu_bytes"] = in_use
    return memory
