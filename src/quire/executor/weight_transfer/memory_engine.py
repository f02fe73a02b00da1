"""The backend "ipc": tensors in memory that the trainer shares with the workers of its host."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from quire.distributed.named_tensors import bytes_of, metas_of, views_of
from quire.distributed.shared_buffer import HANDLE_KEY, SharedViews
from quire.errors import InvalidParameter
from quire.executor.weight_transfer.engines import WeightTransferEngine
from quire.params.weight_transfer import require_checkpoint_format
from quire.processes.functions import unpickle_values

_HANDLES, _PICKLED = "update_info['ipc_handles']", "update_info['ipc_handles_pickled']"
_REBUILDER = ("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
"""The function by which torch opens another process' memory of a GPU; `reduce_tensor` gives it with
its arguments.
"""
_DEVICE = 6
"""Place of the GPU's number among these arguments."""
_IN_PAIRS = frozenset(
    {
        _REBUILDER, ("torch", "Tensor"), ("torch", "Size"), ("torch.nn.parameter", "Parameter"),
        ("torch.storage", "UntypedStorage"),
    }
)  # fmt: skip


@dataclass
class MemoryInitInfo:
    """`packed`: the tensors of an update lie one after the other in one buffer."""

    packed: bool = False


@dataclass
class MemoryUpdateInfo:
    """The tensors that the trainer shares now. `ipc_handles` names the memory of each, or of the
    one buffer that has all; `tensor_sizes` are then their bytes. `ipc_handles_pickled`: the same,
    pickled, in base64. `packed` and `is_checkpoint_format`: older forms have them here.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles: list[dict[str, Any]] | dict[str, Any] | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[int] | None = None
    packed: bool | None = None
    is_checkpoint_format: bool = True


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
        require_checkpoint_format(update_info.is_checkpoint_format)
        handles, pickled = update_info.ipc_handles, update_info.ipc_handles_pickled
        if handles is not None and pickled is not None:
            raise InvalidParameter(_PICKLED, "...", "it cannot be given with ipc_handles")
        if pickled is not None:
            handles = _unpickled(pickled)
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
        if not isinstance(handles, list | tuple) or len(handles) != len(metas):
            allowed = f"a list with one for each of the {len(metas)} tensors"
            raise InvalidParameter(_HANDLES, handles, allowed)
        for meta, handle in zip(metas, handles, strict=True):
            yield from views_of(self._bytes(handle, meta.nbytes), [meta])

    def finish_weight_update(self) -> None:
        self._views.end_update()

    def shutdown(self) -> None:
        self._views.close()

    def _bytes(self, handle: object, nbytes: int) -> Tensor:
        if isinstance(handle, Mapping) and HANDLE_KEY in handle:
            return self._views.read(handle[HANDLE_KEY], nbytes)
        if self.device.type != "cuda" or not isinstance(handle, Mapping):
            allowed = f"dicts with the key {HANDLE_KEY!r}, as quire's trainer classes make them"
            hint = "Tensors in a GPU's memory are shared with an engine on that GPU."
            raise InvalidParameter(_HANDLES, handle, allowed, hint)
        data = bytes_of(_of_gpu(handle, self.device))
        if len(data) != nbytes:
            raise InvalidParameter(_HANDLES, len(data), f"{nbytes} bytes, as the shapes say")
        return data


def _unpickled(text: object) -> Any:
    """Handles as they were before they were pickled. Raises InvalidParameter for anything else, and
    where nothing may be unpickled.
    """
    try:
        if not isinstance(text, str):
            raise ValueError("it is not text")
        return unpickle_values(base64.b64decode(text, validate=True), _is_in_pairs)
    except (ValueError, binascii.Error) as error:
        hint = "Send ipc_handles, which are plain values in quire's own trainer classes."
        raise InvalidParameter(_PICKLED, "...", str(error), hint) from error


def _is_in_pairs(module: str, name: str) -> bool:
    is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    return is_dtype or (module, name) in _IN_PAIRS


def _of_gpu(handle: Mapping[str, Any], device: torch.device) -> Tensor:
    """The tensor that a trainer shares on this GPU."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    pair = handle.get(gpu)
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        allowed = f"one for the worker's GPU, {gpu}: a function of torch and its arguments"
        raise InvalidParameter(_HANDLES, list(handle), allowed)
    rebuild, given = pair
    is_known = (
        isinstance(rebuild, FunctionType)
        and (rebuild.__module__, rebuild.__qualname__) == _REBUILDER
    )
    if not is_known or not isinstance(given, list | tuple) or len(given) <= _DEVICE:
        allowed = f"{_REBUILDER[1]} of torch, as reduce_tensor gives it, and its arguments"
        raise InvalidParameter(_HANDLES, repr(rebuild), allowed)
    # the trainer may see this GPU under another number
    opened = rebuild(*given[:_DEVICE], torch.cuda.current_device(), *given[_DEVICE + 1 :])
    assert isinstance(opened, Tensor)
    return opened
