"""The backend "sparse_nccl": a few values of some tensors, through the group of "nccl"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.distributed.named_tensors import TensorPatch, metas_of
from quire.errors import InvalidParameter, LoadError
from quire.executor.weight_transfer.group_engine import (
    GroupInitInfo,
    GroupPlace,
    GroupTransferEngine,
)
from quire.models.updates.values import has_nan


@dataclass
class PatchUpdateInfo:
    """The tensors of which the trainer sends values now, with their whole shapes, and how many of
    each: first the int32 places in the flat tensor, then the values. None come of a tensor with 0.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    num_updates_list: list[int]


class PatchTransferEngine(GroupTransferEngine):
    """A worker's side. Patches wait for the end of the update: a layer is packed once."""

    init_info_cls = GroupPlace
    update_info_cls = PatchUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._patches: list[TensorPatch] = []

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the group. Raises WeightUpdateError."""
        super().init_transfer_engine(GroupInitInfo(**vars(init_info)))

    def start_weight_update(self) -> None:
        self._patches.clear()

    def receive_weights(self, update_info: Any) -> None:
        """Receive what the trainer broadcasts. Raises InvalidParameter for places outside of a
        tensor, LoadError for NaN, once all has come.
        """
        assert self._communicator is not None, "init comes first"
        metas = metas_of(update_info.names, update_info.dtype_names, update_info.shapes)
        counts = update_info.num_updates_list
        is_list = isinstance(counts, list | tuple) and len(counts) == len(metas)
        if not is_list or not all(type(n) is int and n >= 0 for n in counts):
            allowed = f"a number, not below 0, for each of the {len(metas)} tensors"
            raise InvalidParameter("update_info['num_updates_list']", counts, allowed)
        found = []
        for meta, count in zip(metas, counts, strict=True):
            if count:
                places = torch.empty(count, dtype=torch.int32, device=self.device)
                values = torch.empty(count, dtype=meta.dtype, device=self.device)
                for each in (places, values):
                    self._communicator.broadcast(each, 0)
                size = meta.nbytes // meta.dtype.itemsize
                found.append((size, places, TensorPatch(meta, places, values)))
        for size, places, patch in found:
            if int(places.min()) < 0 or int(places.max()) >= size:
                allowed = f"from 0 to {size - 1}, in the flat tensor"
                raise InvalidParameter(f"indices of {patch.meta.name}", "others", allowed)
            if has_nan(patch.values):
                raise LoadError(f"{patch.meta.name} has NaN among its values.")
        self._patches += (patch for _, _, patch in found)

    def finish_weight_update(self) -> None:
        """Give the model the layers that change. Raises WeightMismatch for names and shapes of
        other tensors than the model's, LoadError for another type than the files have,
        WeightUpdateError where the values between the patches are not known.
        """
        patches, self._patches = self._patches, []
        for tensors in self.model.patched_tensors(patches):
            self.load(tensors.items())
        super().finish_weight_update()
