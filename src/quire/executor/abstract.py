"""An engine core's only interface to devices: launch a step, call every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from quire.executor.worker_config import WorkerFacts
from quire.params import RequestParams
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan


class LaunchedStep(Protocol):
    """A running step: sampled at once, or when a late mask is known; read when results are due."""

    def sample(self, mask: GrammarMask | None = None) -> None: ...
    def result(self) -> RunnerOutput: ...

    def drafts(self, row: int, count: int) -> list[int]:
        """Return the first `count` drafts of a row that the step verifies; before `sample`."""
        ...


class Executor(Protocol):
    """Workers that run the same steps, each on its device.

    A failure of one of them is a failure of the step on all: it raises what that worker raised, and
    the step can be launched again.
    """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; steps run in the order of the calls.

        As long as `sample` has not returned, the step may be launched again with some of the plan's
        tokens and the same id: its changes of rows are made once, its tokens' K/V is written again.
        A plan without tokens only changes rows. Raises RowFailures for rows that cannot run,
        EngineDeadError when a worker or its device is gone.
        """
        ...

    def needs_host_ids(self, params: RequestParams) -> bool:
        """Whether a request with these parameters must not be scheduled ahead of its last id."""
        ...

    def read_adapter(self, folder: str) -> int:
        """Have the workers read, check and keep the adapter in a folder, while steps may run.
        Returns its number, which follows from its contents, and which plans load it into slots by.
        Raises RequestError subclasses that say what is wrong with it.
        """
        ...

    def check_adapter(self, folder: str) -> None:
        """Raise what `read_adapter` raises, as far as it shows before values are read; nothing is
        kept.
        """
        ...

    def drop_adapter(self, number: int) -> None:
        """Have the workers forget a kept adapter; slots that have it still do."""
        ...

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a worker's method (by name), or a function with the worker in front; one result
        each.
        """
        ...

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called once, from any thread, when workers are lost that nobody waits
        for, with the reason. Workers of the calling process are not.
        """
        ...

    def shutdown(self) -> None:
        """Release all workers and their memory."""
        ...


class BuiltExecutor(Executor, Protocol):
    """An executor with the workers that were built for it."""

    @property
    def facts(self) -> WorkerFacts:
        """The facts about every worker that the scheduler and the core need."""
        ...
