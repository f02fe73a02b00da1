"""The methods of a worker by which its core changes the weights."""

from __future__ import annotations

from typing import Any

from quire.errors import InvalidParameter
from quire.executor.weight_transfer.session import WorkerWeights


class WeightMethods:
    """Methods of `Worker` for new weights; session.py says what each raises."""

    weights: WorkerWeights
    rank: int
    dp_rank: int
    world_size: int

    def connect_trainer(self, init_info: dict[str, Any]) -> None:
        self.weights.connect(init_info)

    def disconnect_trainer(self) -> None:
        self.weights.disconnect()

    def begin_update(self, is_draft: bool) -> None:
        """Begin an update; no step is in flight, and none comes before its end."""
        self.weights.start(is_draft)

    def receive_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive tensors; of a list, what this worker's number among all names."""
        if isinstance(update_info, list):
            place = self.dp_rank * self.world_size + self.rank
            if place >= len(update_info):
                count = f"{len(update_info)} entries"
                raise InvalidParameter("update_info", count, f"one for worker {place}, too")
            update_info = update_info[place]
        self.weights.receive(update_info)

    def finish_receiving(self) -> int:
        """End the update; returns how many tensors have come."""
        return self.weights.finish()

    def commit_update(self, token: str) -> None:
        """All workers of all cores have what has come."""
        self.weights.commit(token)

    def restore_update(self, token: str) -> str:
        """Take the weights of an update from the snapshot of a worker before this one; returns why
        not, or an empty text.
        """
        return self.weights.restore(token)

    def settle_snapshot(self) -> None:
        """Wait until the snapshot of the last update is written."""
        self.weights.settle_snapshot()

    def abandon_update(self, reason: str) -> bool:
        """Give the update up; returns whether the weights are a mixture."""
        return self.weights.abandon(reason)

    def spoil_weights(self, reason: str, is_draft: bool | None = None) -> None:
        """Another worker has a mixture, or other weights."""
        self.weights.spoil(reason, is_draft)

    def compute_weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every weight as it is kept, by its name and this worker's place."""
        at = f"dp{self.dp_rank}:pp{self.pp_rank}:pcp0:tp{self.tp_rank}:"
        return {at + name: digest for name, digest in self.weights.checksums().items()}

    def count_weight_changes(self) -> int:
        """Number of times that the model was given weights outside of an update."""
        return self.weights.num_changes

    @property
    def tp_rank(self) -> int:
        """The number among the workers that share layers."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """The number of the stage."""
        return self.rank // self.tp_size

    tp_size: int


class WorkerViews:
    """Views of the engine's plan on a worker, for methods of `worker_extension_cls`."""

    model_runner: Any
    rank: int
    tp_size: int

    @property
    def vllm_config(self) -> Any:
        """The engine's plan."""
        return self.model_runner.vllm_config

    @property
    def model_config(self) -> Any:
        """The plan's model."""
        return self.vllm_config.model_config

    @property
    def parallel_config(self) -> Any:
        """The plan's number and place of cores and workers."""
        return self.vllm_config.parallel_config

    @property
    def load_config(self) -> Any:
        """The plan's source of the weights."""
        return self.vllm_config.load_config

    @property
    def is_driver_worker(self) -> bool:
        """Whether this is the first of the workers that share its layers."""
        return self.rank % self.tp_size == 0
