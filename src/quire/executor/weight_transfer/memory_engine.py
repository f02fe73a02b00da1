"""The backend "ipc": tensors in memory that the trainer shares with the workers of its host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.distributed.named_tensors import metas_of, views_of
from quire.distributed.shared_buffer import HANDLE_KEY, SharedViews
from quire.errors import InvalidParameter, NotBuiltYet
from quire.executor.weight_transfer.engines import WeightTransferEngine


@dataclass
class MemoryInitInfo:
    """`packed`: the tensors of an update lie one after the other in one buffer."""

    packed: bool = False


@dataclass
class MemoryUpdateInfo:
    """The tensors that the trainer shares now. `ipc_handles` names the memory of each, or of the
    one buffer that has all; `tensor_sizes` are then their bytes.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles: list[dict[str, Any]] | dict[str, Any] | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[int] | None = None
    packed: bool | None = None


class MemoryTransferEngine(WeightTransferEngine):
    """A worker's side."""

    init_info_cls = MemoryInitInfo
    update_info_cls = MemoryUpdateInfo
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._views = SharedViews()

    def start_weight_update(self) -> None:
        self._views.end_update()

    def receive_weights(self, update_info: MemoryUpdateInfo) -> None:
        """Read the tensors where they are. Raises InvalidParameter for handles that name no memory
        of this host and user.
        """
        if update_info.ipc_handles_pickled is not None:
            hint = "Handles of quire's own trainer classes are plain values: send ipc_handles."
            raise NotBuiltYet("update_info['ipc_handles_pickled']", "...", hint)
        handles = update_info.ipc_handles
        if handles is None:
            raise InvalidParameter("update_info", None, "it names the memory: ipc_handles")
        self.load(self._read(update_info, handles))

    def _read(
        self, info: MemoryUpdateInfo, handles: list[dict[str, Any]] | dict[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        metas = metas_of(info.names, info.dtype_names, info.shapes)
        if isinstance(handles, Mapping):
            total = sum(meta.nbytes for meta in metas)
            if info.tensor_sizes is not None and sum(info.tensor_sizes) != total:
                raise InvalidParameter(
                    "update_info['tensor_sizes']", sum(info.tensor_sizes), f"together {total}"
                )
            yield from views_of(self._bytes(handles, total), metas)
            return
        if len(handles) != len(metas):
            allowed = f"one for each of the {len(metas)} tensors"
            raise InvalidParameter("update_info['ipc_handles']", len(handles), allowed)
        for meta, handle in zip(metas, handles, strict=True):
            yield from views_of(self._bytes(handle, meta.nbytes), [meta])

    def finish_weight_update(self) -> None:
        self._views.end_update()

    def shutdown(self) -> None:
        self._views.close()

    def _bytes(self, handle: object, nbytes: int) -> Tensor:
        if not isinstance(handle, Mapping) or HANDLE_KEY not in handle:
            allowed = f"dicts with the key {HANDLE_KEY!r}, as quire's trainer classes make them"
            raise InvalidParameter("update_info['ipc_handles']", handle, allowed)
        return self._views.read(handle[HANDLE_KEY], nbytes)
