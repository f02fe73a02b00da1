"""The backend "nccl": a process group with the trainer as rank 0, over NCCL where the weights are
in a GPU's memory and over gloo on CPUs.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from quire.distributed.named_tensors import BUFFER_BYTES, metas_of
from quire.distributed.trainer_group import PyNcclCommunicator, StatelessProcessGroup
from quire.errors import NotBuiltYet, WeightUpdateError
from quire.executor.weight_transfer.engines import WeightTransferEngine
from quire.executor.weight_transfer.incoming import (
    IncomingTensors,
    Rooms,
    packed_windows,
    separate_windows,
)
from quire.params.weight_transfer import require_checkpoint_format

logger = logging.getLogger(__name__)


@dataclass
class GroupPlace:
    """Address of a group. A worker's rank is `rank_offset` plus its number among all."""

    world_size: int
    rank_offset: int = 1
    master_address: str | None = None
    master_port: int | None = None
    nccl_unique_id_b64: str | None = None


@dataclass
class GroupInitInfo(GroupPlace):
    """Meeting place of a group, and how it sends tensors that are packed together."""

    packed: bool = False
    packed_buffer_size_bytes: int = BUFFER_BYTES
    packed_num_buffers: int = 2


@dataclass
class GroupUpdateInfo:
    """The tensors that the trainer sends now. `packed` and the two after it: as an older form has
    them here; None: as in the first information.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None
    is_checkpoint_format: bool = True


class GroupTransferEngine(WeightTransferEngine):
    """A worker's side of the group."""

    init_info_cls: type[Any] = GroupInitInfo
    update_info_cls: type[Any] = GroupUpdateInfo
    supports_draft_weight_update = True
    _communicator: PyNcclCommunicator | None = None
    _init: GroupInitInfo | None = None

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rooms = Rooms(device)

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Join the group. Raises WeightUpdateError."""
        if init_info.nccl_unique_id_b64 is not None:
            hint = "Torch's groups meet at a store: give master_address and master_port."
            raise NotBuiltYet("init_info['nccl_unique_id_b64']", "...", hint)
        if init_info.master_address is None or init_info.master_port is None:
            raise WeightUpdateError("init_info needs master_address and master_port.")
        rank = init_info.rank_offset + self.rank
        group = StatelessProcessGroup.create(
            init_info.master_address, init_info.master_port, rank, init_info.world_size
        )
        self._communicator, self._init = PyNcclCommunicator(group, self.device), init_info
        library = "NCCL" if self._communicator.device.type == "cuda" else "gloo"
        logger.info(
            "Weights come by %s from rank 0 of %d; this worker is rank %d.",
            *(library, init_info.world_size, rank),
        )

    def receive_weights(self, update_info: GroupUpdateInfo) -> None:
        """Receive what the trainer broadcasts."""
        assert self._communicator is not None and self._init is not None, "init comes first"
        require_checkpoint_format(update_info.is_checkpoint_format)
        metas = metas_of(update_info.names, update_info.dtype_names, update_info.shapes)
        packed = self._init.packed if update_info.packed is None else update_info.packed
        limit = update_info.packed_buffer_size_bytes or self._init.packed_buffer_size_bytes
        windows = packed_windows(metas, limit) if packed else separate_windows(metas)
        incoming = iter(IncomingTensors(self._communicator, windows, self._rooms))
        try:
            for tensors in incoming:
                self.load(tensors)
        except Exception:
            # the trainer sends what it has announced, and is not to wait for somebody to take it
            with suppress(WeightUpdateError):
                deque(incoming, maxlen=0)
            raise

    def finish_weight_update(self) -> None:
        self._rooms.clear()

    def shutdown(self) -> None:
        self._rooms.clear()
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None
