"""Runs the same task for several workers of one process at once, each in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from quire.distributed.inproc_group import InprocExchange
from quire.distributed.worker_group import ExchangeAborted
from quire.errors import EngineDeadError
from quire.step.faults import RowFailures

T = TypeVar("T")


class WorkerThreads:
    """One thread for each side of an exchange.

    Invariant: between two calls of `run` no thread is in the exchange, and it works.
    """

    def __init__(self, exchange: InprocExchange) -> None:
        self._exchange = exchange
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"worker{rank}")
            for rank in range(exchange.size)
        ]

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run the task of each worker in its thread; their results when all have ended.

        If one raises, the others stop where they would wait for it, and its error is raised here;
        of several errors the most informative one (see `_cause`).
        """
        futures = [
            pool.submit(self._run_one, task) for pool, task in zip(self._pools, tasks, strict=True)
        ]
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            # only now: no thread is in it any more
            self._exchange.reset()
            raise _cause(errors)
        return [future.result() for future in futures]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()

    def _run_one(self, task: Callable[[], T]) -> T:
        try:
            return task()
        except BaseException:
            self._exchange.abort()
            raise


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """Return a dead device's error, else all failed rows, else the first error."""
    dead = [error for error in errors if isinstance(error, EngineDeadError)]
    named = [error for error in errors if isinstance(error, RowFailures)]
    if dead or not named:
        own = [error for error in errors if not isinstance(error, ExchangeAborted)]
        return (dead or own)[0]
    return RowFailures({row: text for error in named for row, text in error.errors.items()})
