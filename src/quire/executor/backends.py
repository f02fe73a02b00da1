"""The executors by their names in `distributed_executor_backend`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from quire.config.plan_parts import ParallelPlan
from quire.distributed.expert_exchange import ExpertExchange
from quire.executor.abstract import BuiltExecutor, Executor
from quire.executor.platform import Platform
from quire.executor.ranks.multiproc import MultiprocExecutor, open_multiproc
from quire.executor.uniproc import UniprocExecutor, open_uniproc
from quire.executor.worker_config import WorkerConfig


class OpenExecutor(Protocol):
    """Builds the workers that `config` describes, and their executor.

    `platform` replaces the device that `config` names. `exchange` connects cores that share
    experts. Raises LoadError if the model cannot be loaded or there is not enough memory.
    """

    def __call__(
        self,
        config: WorkerConfig,
        *,
        platform: Platform | None = None,
        exchange: ExpertExchange | None = None,
    ) -> BuiltExecutor: ...


EXECUTORS: Mapping[str, OpenExecutor] = MappingProxyType(
    {"uni": open_uniproc, "mp": open_multiproc}
)

_CLASSES: Mapping[str, type[Executor]] = MappingProxyType(
    {"uni": UniprocExecutor, "mp": MultiprocExecutor}
)


class NamesExecutor(Protocol):
    """What an engine was made from, as far as it names its executor."""

    @property
    def parallel(self) -> ParallelPlan: ...


def executor_class_of(vllm_config: NamesExecutor) -> type[Executor]:
    """The class of the executor that an engine was made with."""
    return _CLASSES[vllm_config.parallel.distributed_executor_backend]
