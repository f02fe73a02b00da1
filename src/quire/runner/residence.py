"""What of a runner's memory is there: weights and KV memory can go while an engine sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.models.decoder import DecoderModel
from quire.runner.device import Device
from quire.runner.graphs import Forward
from quire.runner.kv_cache import KVCache

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class Residence:
    """Releases and restores by tag ("weights", "kv_cache").

    `load` gives the model with the weights that the engine was started with. Invariant: the
    recorded program exists exactly while both are there, since it holds the addresses of both.
    """

    def __init__(
        self,
        *,
        model: DecoderModel,
        kv_cache: KVCache,
        forward: Forward,
        load: Callable[[], DecoderModel],
        device: Device,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._forward = forward
        self._load = load
        self._device = device
        self.released: list[str] = []

    def release(self, tags: Iterable[str]) -> None:
        """Give the memory of `tags` back to the operating system; what is gone already stays
        gone.
        """
        wanted = [tag for tag in tags if tag not in self.released]
        self._forward.release()
        for tag in wanted:
            if tag == WEIGHTS:
                self._model.release_weights()
            else:
                self._kv_cache.release()
            self.released.append(tag)
        self._device.return_free_memory()

    def restore(self, tags: Iterable[str]) -> None:
        """Bring `tags` back: weights from where they came from, KV memory empty.

        Raises LoadError when the checkpoint cannot be read any more; then the weights stay
        released.
        """
        for tag in [tag for tag in tags if tag in self.released]:
            if tag == WEIGHTS:
                self._model.take_weights(self._load())
            else:
                self._kv_cache.restore()
            self.released.remove(tag)
        if not self.released:
            self._forward.record()
