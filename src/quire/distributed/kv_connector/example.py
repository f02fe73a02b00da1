"""A connector that keeps whole prompts as files: a connector to read first, and to write others by.

One folder for each prompt, cut to whole blocks, one file for each layer. It has no bound and
deletes nothing; `OffloadingConnector` is the one for use.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.distributed.kv_connector.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from quire.distributed.kv_connector.views import (
    ConnectorRequest,
    KVCacheBlocks,
    KVCacheConfig,
    StepView,
)
from quire.environment import expanded
from quire.errors import InvalidParameter

_FOLDER, _TENSOR, _COMPLETE = "shared_storage_path", "kv_cache", "complete"


class _Move:
    """The blocks that a prompt is loaded into, or saved from, and its folder."""

    def __init__(self, folder: Path, blocks: list[int]) -> None:
        self.folder, self.blocks = folder, blocks


class _Moves(KVConnectorMetadata):
    def __init__(self) -> None:
        self.loads: list[_Move] = []
        self.saves: list[_Move] = []


class ExampleConnector(KVConnectorBase_V1):
    """Saves prompts and loads those that were saved, in the step that would compute them."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config
        extra = dict(config.kv_connector_extra_config)
        folder = extra.pop(_FOLDER, None)
        where = "kv_transfer_config['kv_connector_extra_config']"
        if not isinstance(folder, str) or not folder or extra:
            raise InvalidParameter(where, config.kv_connector_extra_config, f"{_FOLDER}, a folder")
        self._folder = expanded(folder).absolute()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self._folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            allowed = "a folder that no one else can write to: its files become answers"
            raise InvalidParameter(f"{where}[{_FOLDER!r}]", folder, allowed, "chmod 700 it.")
        self._is_producer, self._is_consumer = config.is_kv_producer, config.is_kv_consumer
        self._block_size = kv_cache_config.kv_cache_groups[0].block_size
        self._root: Callable[[], str | None] = lambda: None
        self._requests: dict[str, ConnectorRequest] = {}
        self._loading: set[str] = set()
        self._moves = _Moves()
        self._bad: set[int] = set()
        self._layers: dict[str, Tensor] = {}

    def bind_root(self, root: Callable[[], str | None]) -> None:
        self._root = root

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._layers = kv_caches

    # The scheduler's half

    def on_new_request(self, request: ConnectorRequest) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self._whole(request)
        if not self._is_consumer or count <= num_computed_tokens:
            return 0, False
        folder = self._folder_of(request)
        if folder is None or not (folder / _COMPLETE).exists():
            return 0, False
        return count - num_computed_tokens, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        folder = self._folder_of(request) if num_external_tokens else None
        if folder is not None:
            tables = blocks.get_block_ids() or ([],)
            count = self._whole(request) // self._block_size
            self._moves.loads.append(_Move(folder, tables[0][:count]))
            self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: StepView) -> KVConnectorMetadata:
        moves, self._moves = self._moves, _Moves()
        for new in scheduler_output.scheduled_new_reqs if self._is_producer else ():
            request = self._requests[new.req_id]
            count = self._whole(request)
            done = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            folder = self._folder_of(request) if 0 < count <= done else None
            if folder is not None and new.req_id not in self._loading:
                blocks = new.block_ids[0][: count // self._block_size]
                moves.saves.append(_Move(folder, blocks))
        self._loading.clear()
        return moves

    def request_finished(
        self, request: ConnectorRequest, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return False, None

    def _whole(self, request: ConnectorRequest) -> int:
        """The tokens of a prompt in whole blocks, without the last one."""
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def _folder_of(self, request: ConnectorRequest) -> Path | None:
        """The folder of a prompt, by all that its K/V depends on."""
        number, root = self._whole(request) // self._block_size, self._root()
        if not number or root is None:
            return None
        return self._folder / root / request.block_hashes[number - 1].hex()

    # The worker's half

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, _Moves), "its own metadata"
        for move in moves.loads:
            for name, layer in self._layers.items():
                rows = _read(move.folder / f"{name}.safetensors", layer, len(move.blocks))
                if rows is None:
                    self._bad.update(move.blocks)
                    break
                layer[torch.tensor(move.blocks, device=layer.device)] = rows.to(layer.device)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads have ended when `start_load_kv` returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, _Moves), "its own metadata"
        for move in moves.saves:
            rows = kv_layer[torch.tensor(move.blocks, device=kv_layer.device)].cpu().contiguous()
            move.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = move.folder / f".{secrets.token_hex(8)}"
            save_file({_TENSOR: rows}, part)
            os.replace(part, move.folder / f"{layer_name}.safetensors")

    def wait_for_save(self) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, _Moves), "its own metadata"
        for move in moves.saves:
            (move.folder / _COMPLETE).touch()

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad


def _read(file: Path, like: Tensor, count: int) -> Tensor | None:
    """The blocks in a file; None for one that is not whole or is of another layout."""
    try:
        with safe_open(file, "pt") as stored:
            rows: Tensor = stored.get_tensor(_TENSOR).clone()
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return None
    return rows if rows.shape == (count, *like.shape[1:]) and rows.dtype == like.dtype else None
