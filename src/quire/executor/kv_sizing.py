"""Number of KV blocks that fit a device, measured with everything else in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from quire.config.kv_pool_size import MeasuredMemory, gib
from quire.errors import LoadError
from quire.executor.worker_config import WorkerConfig
from quire.models.kv_pool import KVPool
from quire.runner.forward.forward import Forward
from quire.runner.runner import ModelRunner
from quire.runner.warm_up import SCRATCH_BLOCK

logger = logging.getLogger(__name__)

PROBE_BLOCKS = SCRATCH_BLOCK + 1
"""Blocks of the pool while the workspace is measured."""


def size_kv_cache(
    config: WorkerConfig,
    free_bytes: Callable[[], int] | None,
    runner: ModelRunner,
    forwards: Sequence[Forward],
    *,
    free_at_start: int,
    reserved_bytes: int,
) -> None:
    """Resize the KV cache of a runner, which is warm and has PROBE_BLOCKS blocks, to what fits on
    the device.

    `forwards` have recorded over these blocks, so their memory is included; they record again.
    reserved_bytes: what is allocated later, such as the rows of encoders.
    Raises LoadError if one request of full length would not fit.
    """
    assert free_bytes is not None, "a share of memory that cannot be measured"
    kv_cache = runner.kv_cache
    block_bytes = kv_cache.nbytes // PROBE_BLOCKS
    assert config.memory.measures_memory, "the number of blocks is given"
    free_now = free_bytes() - reserved_bytes
    memory = MeasuredMemory(free_at_start, free_now, config.memory.memory_utilization)
    num_blocks = blocks_for(config, kv_cache.pool, memory, block_bytes)
    # what was recorded has the addresses of the blocks that go now
    for forward in forwards:
        forward.release()
    runner.device.return_free_memory()
    kv_cache.resize(num_blocks)
    for forward in forwards:
        forward.record()
    logger.info("The KV cache has %d blocks, %s.", num_blocks, gib(num_blocks * block_bytes))


def blocks_for(config: WorkerConfig, pool: KVPool, memory: MeasuredMemory, block_bytes: int) -> int:
    """The number of blocks. Raises LoadError when one request of full length would not fit."""
    length = config.max_len
    most = pool.enough(config.num_rows, length, config.step_size)
    num_blocks = memory.num_blocks(block_bytes, most)
    fits = pool.longest(num_blocks, length, is_chunked=config.steps.enable_chunked_prefill)
    if fits < length:
        raise LoadError(
            f"One request of max_model_len={length} does not fit in the {max(num_blocks, 0)} KV "
            f"blocks that {gib(memory.room)} hold: {gib(memory.free_at_start)} of the device were "
            f"free, and weights, graphs and workspace have left {gib(memory.free_now)}. "
            f"Pass max_model_len={fits} (or -1), or a larger gpu_memory_utilization."
        )
    return num_blocks
