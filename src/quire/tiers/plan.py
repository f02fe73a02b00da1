"""`KVTierPlan`: where K/V is kept outside of the pool."""

from __future__ import annotations

import msgspec


class DiskTierPlan(msgspec.Struct, frozen=True):
    """Files in `folder`, at most `max_bytes` for all engines that share it. `num_readers` and
    `num_writers` are threads.
    """

    folder: str
    max_bytes: int
    num_readers: int
    num_writers: int


class KVTierPlan(msgspec.Struct, frozen=True):
    """`host_bytes` of host memory, and a folder that what is stored there is written to, too (None:
    nothing is). A content is stored the `store_threshold`-th time that it is computed, as far as
    the last `max_tracker_size` contents show.

    `memory_fd`: of host memory that outlives the core (`HostMemory`), in whose `region` the worker
    keeps its own; -1: the memory is the worker's.
    """

    host_bytes: int
    disk: DiskTierPlan | None = None
    store_threshold: int = 1
    max_tracker_size: int = 64_000
    memory_fd: int = -1
    region: int = 0
