"""The sender of patches: a few values of some tensors, for the backend "sparse_nccl"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.distributed.named_tensors import TensorMeta
from quire.errors import InvalidParameter
from quire.trainers.clients import WeightSyncClient
from quire.trainers.senders import (
    ROOT,
    GroupSender,
    WeightTransferTrainerFactory,
    meet_engines,
    while_engine,
)
from quire.trainers.sources import WeightSource, described


@dataclass
class SparseWeightPatch:
    """New values at some places of the flat tensor of this name, whose whole shape is
    `full_shape`.
    """

    name: str
    indices: Tensor
    values: Tensor
    full_shape: Sequence[int]

    def check(self) -> None:
        """Raise InvalidParameter for places and values that are not equally many, or outside."""
        count, size = self.indices.numel(), math.prod(self.full_shape)
        if self.values.numel() != count:
            raise InvalidParameter(f"values of {self.name}", self.values.numel(), f"{count}")
        if count and not 0 <= int(self.indices.min()) <= int(self.indices.max()) < size:
            allowed = f"from 0 to {size - 1}, in the flat tensor"
            raise InvalidParameter(f"indices of {self.name}", "others", allowed)
        if size > 1 << 31:
            raise InvalidParameter(f"full_shape of {self.name}", size, "at most 2**31 values")


@dataclass
class SparseNCCLTrainerInitInfo:
    """A process group of the trainer's first rank and all workers. `world_size` counts both."""

    master_address: str
    master_port: int
    world_size: int
    rank: int = ROOT
    device: str | None = None


class PatchSender(GroupSender):
    """The backend "sparse_nccl". Ranks other than the first send nothing."""

    sends_source = False

    def __init__(
        self,
        init_info: SparseNCCLTrainerInitInfo,
        client: WeightSyncClient,
        source: WeightSource | None,
    ) -> None:
        if source is not None:
            hint = "Give patches to send_weights."
            raise InvalidParameter("source", "a source", "None for sparse_nccl", hint)
        self._client = client
        self._is_root = init_info.rank == ROOT
        if self._is_root:
            self._communicator = meet_engines(init_info, client, {})

    def send_weights(  # type: ignore[override]  # a source is what the others send
        self, patches: Iterable[SparseWeightPatch], version: str | None = None
    ) -> None:
        """Send patches as one update, under the name `version`. Raises what the engine says."""
        if not self._is_root:
            return
        self._check()
        self._client.start_weight_update()
        self.send_weight_chunk(patches)
        self._client.finish_weight_update(version)

    def send_weight_chunk(self, patches: Iterable[SparseWeightPatch]) -> None:
        """Send patches in an update that the caller has started, and finishes. Raises
        InvalidParameter for places outside of a tensor.
        """
        if not self._is_root:
            return
        chosen = list(patches)
        for patch in chosen:
            patch.check()
        metas = [
            TensorMeta(patch.name, patch.values.dtype, tuple(patch.full_shape)) for patch in chosen
        ]
        info = described(metas) | {"num_updates_list": [p.indices.numel() for p in chosen]}
        while_engine(
            partial(self._client.update_weights, info),
            partial(self._broadcast, chosen),
            self._communicator.give_up,
        )

    def _broadcast(self, patches: list[SparseWeightPatch]) -> None:
        device = self._communicator.device
        for patch in patches:
            for each in (patch.indices.to(torch.int32), patch.values.detach()):
                self._communicator.broadcast(each.reshape(-1).contiguous().to(device), ROOT)


WeightTransferTrainerFactory.register(SparseNCCLTrainerInitInfo, PatchSender)
