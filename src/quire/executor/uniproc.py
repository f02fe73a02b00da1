"""One worker in this process, called directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.errors import EngineDeadError, InvalidParameter
from quire.executor.worker import Worker
from quire.params import RequestParams
from quire.runner.runner import NoTokens, Step
from quire.scheduling.step import StepPlan


class UniprocExecutor:
    """The executor for one device."""

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker

    @property
    def worker(self) -> Worker:
        """The worker. Raises EngineDeadError after `shutdown`."""
        if self._worker is None:
            raise EngineDeadError("The engine was closed; make a new one.")
        return self._worker

    def launch(self, plan: StepPlan) -> Step | NoTokens:
        return self.worker.launch(plan)

    def needs_host_ids(self, params: RequestParams) -> bool:
        return self.worker.model_runner.needs_host_ids(params)

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        if callable(method):
            return [method(self.worker, *args, **kwargs)]
        found = None if method.startswith("_") else vars(type(self.worker)).get(method)
        if not callable(found):
            known = sorted(n for n in vars(type(self.worker)) if not n.startswith("_"))
            raise InvalidParameter(
                "method", method, f"a worker has the methods {', '.join(known)}",
                "A function that takes the worker can be passed instead.",
            )  # fmt: skip
        return [found(self.worker, *args, **kwargs)]

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
