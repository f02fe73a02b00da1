"""Workers in this process as far as executors treat them alike: control, adapters, the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quire.errors import EngineDeadError, InvalidParameter
from quire.executor.worker import Worker
from quire.executor.worker_config import WorkerFacts
from quire.params import RequestParams

T = TypeVar("T")


class LocalWorkers:
    """The workers of an executor, by rank."""

    def __init__(self, workers: Sequence[Worker], on_close: Callable[[], None]) -> None:
        """`on_close` restores what the workers changed in this process."""
        self._workers = list(workers)
        self._on_close = on_close

    @property
    def workers(self) -> list[Worker]:
        """The workers by rank. Raises EngineDeadError after `shutdown`."""
        if not self._workers:
            raise EngineDeadError("The engine was closed; make a new one.")
        return self._workers

    @property
    def worker(self) -> Worker:
        """The first worker."""
        return self.workers[0]

    @property
    def driver_worker(self) -> Worker:
        """The first worker, by the reference's name."""
        return self.worker

    @property
    def facts(self) -> WorkerFacts:
        every = [worker.facts for worker in self.workers]
        return replace(every[0], num_blocks=min(facts.num_blocks for facts in every))

    def needs_host_ids(self, params: RequestParams) -> bool:
        return self.worker.needs_host_ids(params)

    def read_adapter(self, folder: str) -> int:
        return [worker.read_adapter(folder) for worker in self.workers][0]

    def check_adapter(self, folder: str) -> None:
        self.worker.check_adapter(folder)

    def drop_adapter(self, number: int) -> None:
        for worker in self.workers:
            worker.drop_adapter(number)

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        if callable(method):
            return self._on_all(lambda worker: method(worker, *args, **kwargs))
        kind = type(self.worker)
        known = [n for n in dir(kind) if not n.startswith("_") and callable(getattr(kind, n))]
        if method not in known:
            raise InvalidParameter(
                "method", method, f"a worker has the methods {', '.join(known)}",
                "A function that takes the worker can be passed instead.",
            )  # fmt: skip
        return self._on_all(lambda worker: getattr(worker, method)(*args, **kwargs))

    def _on_all(self, task: Callable[[Worker], T]) -> list[T]:
        """Return task(worker) of each worker."""
        return [task(worker) for worker in self.workers]

    def shutdown(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        if workers:
            self._on_close()
