"""Connectors of encoder caches: outputs of encoders that are kept outside of an engine, so that
another one, or the same after a restart, need not make them again.

The names are vLLM's. A class of one's own is written for both of its halves, the scheduler's
(`has_cache_item`, `update_state_after_alloc`, `build_connector_meta`) and the worker's
(`start_load_caches`, `save_caches`); here one object has both, in the worker.
"""

from __future__ import annotations

import enum
import logging
import os
import tempfile
import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

logger = logging.getLogger(__name__)

_TENSOR, _SUM = "ec_cache", "crc32"


class ECConnectorRole(enum.Enum):
    """The half of a connector that an object is."""

    SCHEDULER = 0
    WORKER = 1


class ECConnectorMetadata:
    """The message of a scheduler's half to a worker's for a step."""


class ECConnectorBase(ABC):
    """Keeps outputs of encoders by the names of their items."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """vllm_config: an object with an `ec_transfer_config`."""
        self._vllm_config, self._role = vllm_config, role
        config = vllm_config.ec_transfer_config
        self._is_producer, self._is_consumer = config.is_ec_producer, config.is_ec_consumer
        self._connector_metadata: ECConnectorMetadata | None = None

    @property
    def role(self) -> ECConnectorRole:
        """The half that this object is."""
        return self._role

    @property
    def is_producer(self) -> bool:
        """Whether outputs are saved."""
        return bool(self._is_producer)

    @property
    def is_consumer(self) -> bool:
        """Whether outputs are loaded."""
        return bool(self._is_consumer)

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """Set what the scheduler's half has told, for one step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Drop it after the step."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> ECConnectorMetadata:
        assert self._connector_metadata is not None, "a step is running"
        return self._connector_metadata

    @abstractmethod
    def start_load_caches(self, encoder_cache: dict[str, Tensor], **kwargs: Any) -> None:
        """Put the outputs that the metadata names into `encoder_cache`."""

    @abstractmethod
    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Keep the output of the item `mm_hash`, which is in `encoder_cache`."""

    @abstractmethod
    def has_cache_item(self, identifier: str) -> bool:
        """Whether an item's output is kept."""

    @abstractmethod
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Have the item `request.mm_features[index]` loaded in this step."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        """The message for the worker's half in this step; the next one begins anew."""


class _Wanted(ECConnectorMetadata):
    """Names of the items to load."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class ECExampleConnector(ECConnectorBase):
    """Keeps outputs as files in a folder, `shared_storage_path`, one folder for each item. A file
    that is not whole counts as none.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        config = vllm_config.ec_transfer_config
        self._folder = Path(config.get_from_extra_config("shared_storage_path", "/tmp"))
        self._wanted: list[str] = []

    def start_load_caches(self, encoder_cache: dict[str, Tensor], **kwargs: Any) -> None:
        wanted = self._get_connector_metadata()
        assert isinstance(wanted, _Wanted), "its own metadata"
        for name in wanted.names:
            if (rows := _read(self._file(name))) is not None:
                encoder_cache[name] = rows

    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **kwargs: Any) -> None:
        file = self._file(mm_hash)
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = encoder_cache[mm_hash].detach().cpu().contiguous()
        # Written next to its place and moved there: who reads meanwhile finds all of it or nothing.
        number, part = tempfile.mkstemp(dir=file.parent, prefix=".part-")
        os.close(number)
        try:
            save_file({_TENSOR: rows}, part, {_SUM: str(_sum_of(rows))})
            os.replace(part, file)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise

    def has_cache_item(self, identifier: str) -> bool:
        return self._file(identifier).exists()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._wanted.append(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        wanted, self._wanted = self._wanted, []
        return _Wanted(wanted)

    def _file(self, name: str) -> Path:
        return self._folder / name / "encoder_cache.safetensors"


def _read(file: Path) -> Tensor | None:
    """The rows in a file; None for one that is torn."""
    try:
        with safe_open(file, "pt") as stored:
            rows: Tensor = stored.get_tensor(_TENSOR).clone()
            stated = (stored.metadata() or {}).get(_SUM)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        logger.warning("%s is not read, and its rows are made again: %s", file, error)
        return None
    if stated != str(_sum_of(rows)):
        logger.warning("%s is not whole: its rows are made again.", file)
        return None
    return rows


def _sum_of(rows: Tensor) -> int:
    return zlib.crc32(rows.contiguous().view(torch.uint8).numpy().tobytes())
