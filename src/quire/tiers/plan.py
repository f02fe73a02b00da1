"""`KVTierPlan`: where K/V is kept outside of the pool."""

from __future__ import annotations

import msgspec


class DiskTierPlan(msgspec.Struct, frozen=True):
    """Files in `folder`, at most `max_bytes` for all engines that share it. `num_readers` and
    `num_writers` are threads. `publishes`: events tell of the files. `mac_key_file`:
    has the key of a folder that others may write to.
    """

    folder: str
    max_bytes: int
    num_readers: int
    num_writers: int
    publishes: bool = False
    mac_key_file: str | None = None


class KVTierPlan(msgspec.Struct, frozen=True):
    """`host_bytes` of host memory, and a folder that what is stored there is written to, too (None:
    nothing is). A content is stored the `store_threshold`-th time that it is computed, as far as
    the last `max_tracker_size` contents show.

    `fails`: a request ends with an error where what is stored for it cannot be read, and is not
    computed.

    `memory_fd`: of host memory that outlives the core (`HostMemory`), in whose `region` the worker
    keeps its own; -1: the memory is the worker's.
    """

    host_bytes: int
    disk: DiskTierPlan | None = None
    store_threshold: int = 1
    max_tracker_size: int = 64_000
    fails: bool = False
    memory_fd: int = -1
    region: int = 0
