"""The executors by their names in `distributed_executor_backend`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, cast

from quire.config.plan_parts import ParallelPlan
from quire.distributed.expert_exchange import ExpertExchange
from quire.errors import InvalidParameter, InvalidType, PluginError
from quire.executor.abstract import BuiltExecutor, Executor
from quire.executor.platform import Platform
from quire.executor.worker_config import WorkerConfig
from quire.plugins import resolve_reference


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


EXECUTORS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "uni": ("quire.executor.uniproc:open_uniproc", "quire.executor.uniproc:UniprocExecutor"),
        "mp": (
            "quire.executor.machines.node_ranks:open_ranks",
            "quire.executor.ranks.multiproc:MultiprocExecutor",
        ),
        "external_launcher": (
            "quire.executor.ranks.launched:open_external_launcher",
            "quire.executor.ranks.launched:ExternalLauncherExecutor",
        ),
        "ray": (
            "quire.executor.machines.ray_ranks:open_ray",
            "quire.executor.machines.ray_ranks:RayExecutor",
        ),
    }
)
"""The function that opens each, and its class. An engine imports the one that it starts."""


_METHODS = ("launch", "collective_rpc", "shutdown")
"""Methods that every executor has: of a class they are looked for before it is built."""


def find_executor(parallel: ParallelPlan) -> OpenExecutor:
    """Find the function that opens the executor that a plan names, or the class of one's own that
    it names as "module:Class". Raises InvalidParameter, of other things InvalidType.
    """
    name = parallel.distributed_executor_backend
    given = EXECUTORS[name][0] if name in EXECUTORS else name
    try:
        found: Any = resolve_reference(given)
    except PluginError as error:
        raise InvalidParameter("distributed_executor_backend", name, str(error)) from error
    is_other = isinstance(found, type) and not all(hasattr(found, name) for name in _METHODS)
    if is_other or not callable(found):
        allowed = "it must be an executor's class, or a function that makes one"
        raise InvalidType("distributed_executor_backend", name, allowed)
    return cast(OpenExecutor, found)


class NamesExecutor(Protocol):
    """Source of an engine, as far as it names its executor."""

    @property
    def parallel(self) -> ParallelPlan: ...


def executor_class_of(vllm_config: NamesExecutor) -> type[Executor]:
    """The class of the executor that an engine was made with."""
    name = vllm_config.parallel.distributed_executor_backend
    if name in EXECUTORS:
        return cast(type[Executor], resolve_reference(EXECUTORS[name][1]))
    return cast(type[Executor], find_executor(vllm_config.parallel))
