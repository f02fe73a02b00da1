"""Releases the weights and the KV memory of a runner's models while an engine sleeps, and restores
them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.models.loading.load_formats import WeightFiles
from quire.runner.devices.device import Device
from quire.runner.forward.forward import Forward
from quire.runner.kv_cache import KVCache

WEIGHTS, KV_CACHE = "weights", "kv_cache"


logger = logging.getLogger(__name__)

OpenFiles = Callable[[], WeightFiles]


class Loadable(Protocol):
    """Weights that can be released and taken again; see `RunnableModel`."""

    def weight_tensors(self) -> Iterator[Tensor]: ...
    def release_weights(self) -> None: ...
    def take_weights(self, other: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, and the functions that load it with the weights that the engine was started with,
    and that raise LoadError if their files show that they cannot be loaded. Both take other `files`
    of the first model.
    """

    model: Loadable
    load: Callable[..., Loadable]
    check: Callable[..., None] = lambda: None


class Residence:
    """Releases and restores by tag ("weights", "kv_cache").

    Weights are loaded again, the models in their order, unless they are kept on the host.
    Invariant: the recorded programs of `forwards` exist exactly while both are present, since they
    contain the addresses of both.
    """

    def __init__(
        self,
        *,
        models: Sequence[LoadedModel],
        kv_cache: KVCache,
        forwards: Sequence[Forward],
        device: Device,
    ) -> None:
        self._models = models
        self._kv_cache = kv_cache
        self._forwards = forwards
        self._device = device
        self._kept: list[_KeptStorage] = []
        self._open_files: OpenFiles | None = None
        self._are_given = False
        """Whether the weights came from files that cannot be opened again."""
        self.released: list[str] = []
        self.loaded_at = time.time()
        """When the weights began to be read; of a start it is set by who has read them."""

    def release(self, tags: Iterable[str], *, keep_weights: bool = False) -> None:
        """Return the memory of `tags` to the system; tags already released are ignored.
        keep_weights: keep the weights in host memory.
        """
        tags = list(tags)
        if WEIGHTS in tags and self._kept and not keep_weights:
            self._kept = []
            self._release_weights()
        wanted = [tag for tag in tags if tag not in self.released]
        for forward in self._forwards:
            forward.release()
        for tag in wanted:
            if tag == WEIGHTS and keep_weights:
                self._kept = _keep(t for r in self._models for t in r.model.weight_tensors())
            elif tag == WEIGHTS:
                self._release_weights()
            else:
                self._kv_cache.release()
            self.released.append(tag)
        self._device.return_free_memory()

    def restore(self, tags: Iterable[str]) -> None:
        """Restore `tags`: weights from host memory or the checkpoint, KV memory empty. Raises
        LoadError if the checkpoint can no longer be read; then the weights stay released.
        """
        for tag in [tag for tag in tags if tag in self.released]:
            if tag == WEIGHTS and self._kept:
                self._bring_back()
            elif tag == WEIGHTS:
                if self._are_given:
                    logger.warning(
                        "The weights that reload_weights was given were not kept: the checkpoint's "
                        "are loaded."
                    )
                    self._are_given = False
                self.loaded_at = time.time()
                target, *others = self._models
                target.model.take_weights(target.load(**self._files()))
                for resident in others:
                    resident.model.take_weights(resident.load())
            else:
                self._kv_cache.restore()
            self.released.remove(tag)
        if not self.released:
            for forward in self._forwards:
                forward.record()

    def reload_weights(
        self, open_files: OpenFiles | None = None, *, stays_open: bool = True
    ) -> None:
        """Load the checkpoint again, in place of the present weights, or what `open_files` opens:
        from now on, if that can be done again (`stays_open`). Networks that draft are those of the
        start. Raises LoadError if the files do not fit the model; then the present weights stay.
        """
        before = self._open_files
        self._open_files = open_files or before
        target, *others = self._models
        try:
            target.check(**self._files())
            for resident in others:
                resident.check()
            self.release([WEIGHTS])
            self._are_given = False
            self.restore([WEIGHTS])
        except BaseException:
            self._open_files = before
            raise
        if not stays_open:
            self._open_files, self._are_given = before, True

    @property
    def files(self) -> OpenFiles | None:
        """The files that weights are loaded from; None: those of the start."""
        return self._open_files

    def read_from(self, open_files: OpenFiles) -> None:
        """Load weights from these files from now on, when they are loaded the next time."""
        self._open_files = open_files

    def _files(self) -> dict[str, WeightFiles]:
        return {} if self._open_files is None else {"files": self._open_files()}

    def _release_weights(self) -> None:
        for resident in self._models:
            resident.model.release_weights()

    def _bring_back(self) -> None:
        for kept in self._kept:
            kept.storage.resize_(kept.values.nbytes)
            _bytes_of(kept.storage).copy_(kept.values)
        self._kept = []


@dataclass(frozen=True, slots=True)
class _KeptStorage:
    """The released storage of one or more tensors, and its bytes on the host."""

    storage: torch.UntypedStorage
    values: Tensor


def _keep(tensors: Iterable[Tensor]) -> list[_KeptStorage]:
    """Move the tensors' memory to the host. The tensor objects remain, without memory, so that
    everything that holds them sees the values again after a restore.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    kept = []
    for storage in storages.values():
        kept.append(_KeptStorage(storage, _bytes_of(storage).to("cpu", copy=True)))
        storage.resize_(0)
    return kept


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
