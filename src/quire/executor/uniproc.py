"""Workers in this process, called directly."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.inproc_group import InprocExchange
from quire.errors import EngineDeadError, LoadError
from quire.executor.abstract import LaunchedStep
from quire.executor.platform import Platform, open_platform
from quire.executor.token_outbox import TokenOutbox
from quire.executor.worker import Worker
from quire.executor.worker_builder import build_worker
from quire.executor.worker_config import WorkerConfig, WorkerFacts
from quire.executor.worker_extension import check_method
from quire.executor.worker_threads import WorkerThreads
from quire.hardware.native import find_native
from quire.params import RequestParams
from quire.runner.runner import NoTokens, Step
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan

T = TypeVar("T")

_MAX_REASON = 200


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
        return self.workers[0]

    @property
    def driver_worker(self) -> Worker:
        """The first worker, by the reference's name."""
        return self.worker

    @property
    def facts(self) -> WorkerFacts:
        every = [worker.facts for worker in self.workers]
        # one plan serves all of them, so the smallest pool bounds it
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
            return self._on_all(lambda worker: worker.call(method, worker, *args, **kwargs))
        check_method(type(self.worker), method)
        return self._on_all(lambda worker: worker.call(getattr(worker, method), *args, **kwargs))

    def _on_all(self, task: Callable[[Worker], T]) -> list[T]:
        """Return task(worker) of each worker."""
        return [task(worker) for worker in self.workers]

    def check_health(self) -> None:
        """Do nothing: workers of this process are as well as it is."""

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Do nothing: workers of this process end with it."""

    def shutdown(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        if workers:
            self._on_close()


class UniprocExecutor(LocalWorkers):
    """One worker, or several that share a model and run each step together.

    The first worker samples and reports. Invariant: outside of a call, the rows of all workers are
    at the same positions, or will be when the next launch has brought the tokens of the last step.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        threads: WorkerThreads | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`threads` run several workers. `on_close` restores what the workers changed in this
        process.
        """
        assert len(workers) == 1 or threads is not None, "several workers wait for each other"
        super().__init__(workers, on_close)
        self._threads = threads
        self._awaited: SharedStep | None = None
        """The last step, where its results advance rows and have not been read."""
        self._tokens = TokenOutbox(len(self._workers))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if self._threads is None:
            return self.worker.launch(plan)
        if self._awaited is not None:
            # the rows of this step begin where the results of that one end
            self._awaited.result()
            self._awaited = None
        launches = [
            partial(worker.launch, plan, tokens=self._tokens.take(rank))
            for rank, worker in enumerate(self.workers)
        ]
        return SharedStep(self._threads, self._threads.run(launches), self._await, self._tokens)

    def _await(self, step: SharedStep) -> None:
        self._awaited = step

    def shutdown(self) -> None:
        if self._workers and self._threads is not None:
            self._threads.close()
        super().shutdown()

    def _on_all(self, task: Callable[[Worker], T]) -> list[T]:
        """Run the tasks at the same time: they may need exchanges."""
        if self._threads is None:
            return super()._on_all(task)
        return self._threads.run([partial(task, worker) for worker in self.workers])


class SharedStep:
    """A step that several workers run."""

    def __init__(
        self,
        threads: WorkerThreads,
        steps: Sequence[Step | NoTokens],
        await_result: Callable[[SharedStep], None],
        outbox: TokenOutbox,
    ) -> None:
        """`await_result` has the next launch read this step first; `outbox` takes what rows got."""
        self._threads = threads
        self._steps = steps
        self._await_result = await_result
        self._outbox = outbox
        self._output: RunnerOutput | None = None

    def sample(self, mask: GrammarMask | None = None) -> None:
        """Compute on all workers; then, only if none failed, advance all."""
        self._threads.run([partial(step.compute, mask) for step in self._steps])
        first, *others = self._steps
        first.advance()
        for step in others:
            if first.moves_rows:
                step.advance_unsampled()
            else:
                step.advance()
        if first.moves_rows:
            self._await_result(self)

    def drafts(self, row: int, count: int) -> list[int]:
        """Return drafts as the first worker has them."""
        return self._steps[0].drafts(row, count)

    def result(self) -> RunnerOutput:
        """Wait for every worker's device, and return the first worker's results, which the others
        get with their next launch where it has verified drafts.
        """
        if self._output is None:
            first, *others = self._steps
            self._output = first.result()
            for step in others:
                step.result()
            if first.moves_rows:
                self._outbox.put(first.new_tokens(), range(1, len(self._steps)))
        return self._output


def open_uniproc(
    config: WorkerConfig,
    *,
    platform: Platform | None = None,
    exchange: ExpertExchange | None = None,
    num_workers: int = 1,
) -> UniprocExecutor:
    """Build the workers in this process.

    A single worker runs on `platform` (None: the device that `config` names), with its experts
    shared through `exchange`. Several workers split the model's heads and feed-forward width and
    share the threads.
    """
    assert num_workers == 1 or (platform is None and exchange is None), "each has its own platform"
    # native kernels have a pool of their own, with which torch's threads would compete
    native, _ = find_native()
    restore_threads = take_torch_threads(config.parallel.num_threads if native is None else 1)
    try:
        if num_workers > 1:
            return _open_several(config, num_workers, restore_threads)
        worker = build_worker(config, platform or open_platform(config), exchange=exchange)
        return UniprocExecutor([worker], on_close=restore_threads)
    except BaseException as error:
        restore_threads()
        if is_out_of_memory(error):
            raise LoadError(_no_memory(config, error)) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the system refused memory: torch has no class for it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _no_memory(config: WorkerConfig, error: BaseException) -> str:
    reason = str(error).partition("\n")[0][:_MAX_REASON] or type(error).__name__
    return (
        f"The system refuses the memory that the engine needs ({reason}): weights, "
        f"{config.memory.num_blocks} KV blocks and the workspace of a step. Lower "
        "kv_cache_memory_bytes, max_num_seqs or max_model_len, or raise the limits of this process "
        "(ulimit -v)."
    )


def _open_several(
    config: WorkerConfig, num_workers: int, on_close: Callable[[], None]
) -> UniprocExecutor:
    each = max(1, config.parallel.num_threads // num_workers)
    own = replace(config, parallel=msgspec.structs.replace(config.parallel, num_threads=each))
    exchange = InprocExchange(num_workers)
    threads = WorkerThreads(exchange)
    builds = [
        partial(build_worker, own, open_platform(own), group=group) for group in exchange.groups()
    ]
    try:
        return UniprocExecutor(threads.run(builds), threads, on_close)
    except BaseException:
        threads.close()
        raise


def take_torch_threads(num_threads: int) -> Callable[[], None]:
    """Set torch's number of threads; the returned function restores the previous number.

    Next to our own pool torch gets one thread: two pools that compete for the same cores slow down
    both.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    return lambda: torch.set_num_threads(before)
