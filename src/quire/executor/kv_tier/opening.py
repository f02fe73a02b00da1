"""Builds a worker's side of the tier: host memory for blocks, copies to it, and the folder."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quire.executor.kv_tier.root import RootParts, kept_digests
from quire.executor.platform import Platform
from quire.runner.block_transfers import BlockTransfers
from quire.runner.devices.block_copies import BlockCopies, CudaCopies, HostCopies
from quire.runner.kv_cache import KVCache
from quire.tiers.disk_store import DiskStore
from quire.tiers.host_memory import region_bytes
from quire.tiers.mac_key import read_mac_key
from quire.tiers.plan import DiskTierPlan, KVTierPlan
from quire.tiers.slot_table import SlotTable, most_slots

logger = logging.getLogger(__name__)

_PAGE = 4096


def open_transfers(
    plan: KVTierPlan, platform: Platform, kv_cache: KVCache, parts: RootParts, share: float
) -> BlockTransfers:
    """Take the host memory of a worker that has this share of its core's K/V. `parts` are those of
    its root, the name of its folder.
    """
    sizes = [kv_cache.content_bytes(group) for group in range(len(kv_cache.pool.groups))]
    largest = max(sizes)
    if largest > _PAGE:
        largest = -(-largest // _PAGE) * _PAGE  # disks write whole pages without a copy
    count = most_slots(largest, int(plan.host_bytes * share))
    offset = plan.region * region_bytes(plan.host_bytes)
    root = parts.name_by_identity().encode()
    table = SlotTable(largest, count, root, plan.memory_fd, offset)
    memory = torch.frombuffer(table.memory, dtype=torch.uint8)
    copies: BlockCopies = HostCopies(kv_cache)
    if platform.driver is not None:
        platform.driver.pin(memory)
        copies = CudaCopies(kv_cache, platform.device.torch)
    else:
        table.touch_ahead()
    starts = map(table.start_of, range(table.count))
    slots: list[Tensor] = [memory[start : start + largest] for start in starts]
    if plan.disk is None:
        return BlockTransfers(copies, slots, table, sizes)
    transfers = BlockTransfers(copies, slots, table, sizes, plan.disk)
    # reading many gigabytes of weights for their digests must not delay the start
    transfers.open(partial(_open_disk, plan.disk, parts), now=parts.is_kept(kept_digests()))
    return transfers


def _open_disk(plan: DiskTierPlan, parts: RootParts) -> DiskStore | None:
    root = parts.name(kept_digests())
    if root is None:
        logger.warning(
            "Files of the model have changed since they were loaded: K/V is kept in memory alone."
        )
        return None
    key = None
    if plan.mac_key_file is not None:
        key = read_mac_key("mac_key_file", Path(plan.mac_key_file))
    return DiskStore(Path(plan.folder), root, plan.max_bytes, key)
