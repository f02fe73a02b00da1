"""The backend "sparse_nccl": a few values of some tensors, through the group of "nccl"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.distributed.named_tensors import TensorMeta, metas_of
from quire.errors import InvalidParameter
from quire.executor.weight_transfer.group_engine import (
    GroupInitInfo,
    GroupPlace,
    GroupTransferEngine,
)


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
        self._patches: dict[str, list[tuple[TensorMeta, Tensor, Tensor]]] = {}

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the group. Raises WeightUpdateError."""
        super().init_transfer_engine(GroupInitInfo(**vars(init_info)))

    def start_weight_update(self) -> None:
        self._patches.clear()

    def receive_weights(self, update_info: Any) -> None:
        """Receive what the trainer broadcasts. Raises InvalidParameter for places outside of a
        tensor, once all has come.
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
                found.append((meta, places, values))
        for meta, places, _ in found:
            size = meta.nbytes // meta.dtype.itemsize
            if int(places.min()) < 0 or int(places.max()) >= size:
                allowed = f"from 0 to {size - 1}, in the flat tensor"
                raise InvalidParameter(f"indices of {meta.name}", "others", allowed)
        for patch in found:
            self._patches.setdefault(patch[0].name, []).append(patch)

    def finish_weight_update(self) -> None:
        """Give the model the layers that change. Raises WeightMismatch for names and shapes of
        other tensors than the model's, WeightUpdateError for weights in another form.
        """
        patches, self._patches = self._patches, {}
        shapes = {name: found[0][0].shape for name, found in patches.items()}
        for tensors in self.model.current_tensors(shapes):
            for name in tensors.keys() & patches.keys():
                for _, places, values in patches[name]:
                    tensors[name].view(-1)[places.long()] = values.to(tensors[name].dtype)
            self.load(tensors.items())
        super().finish_weight_update()
