"""What `collective_rpc` and `apply_model` reach: one worker per device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.models.decoder import DecoderModel
from quire.runner.runner import ModelRunner


class Worker:
    """A device with its runner."""

    def __init__(
        self, runner: ModelRunner, rank: int = 0, on_close: Callable[[], None] | None = None
    ) -> None:
        """`on_close` puts back what building the worker changed in this process."""
        self.model_runner = runner
        self.rank = rank
        self._on_close = on_close

    def close(self) -> None:
        """The worker is not used any more."""
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    def get_model(self) -> DecoderModel:
        """The model that this worker runs."""
        return self.model_runner.model

    def apply_model(self, func: Callable[[DecoderModel], Any]) -> Any:
        """func(model), for looking at it or changing it."""
        return func(self.get_model())

    def kv_cache_bytes(self) -> int:
        """What the KV cache of this worker takes in memory."""
        return self.model_runner.kv_cache.nbytes
