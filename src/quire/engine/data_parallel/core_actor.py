"""A core on a machine of a Ray cluster: the actor there, and its place in the cluster."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.clusters.hosted_process import HostedProcess
from quire.clusters.ray_cluster import CoreMachines, connect, own_address
from quire.config.plan import EnginePlan
from quire.config.plan_parts import ParallelPlan
from quire.engine.process.core_pool import CORE_PROGRAM
from quire.engine.process.start_message import StartMessage
from quire.engine.wire.messages import EngineZmqAddresses
from quire.environment import carried_environment
from quire.errors import InvalidParameter
from quire.processes.child_process import completed
from quire.processes.owned_process import OwnedProcess
from quire.processes.start_message import encode_start

FIRST_PLACEMENT_S, NEXT_PLACEMENT_S = 1800.0, 60.0
"""Seconds that a cluster may take to find room for a core: first, and after its death."""


class DPEngineCoreActor(HostedProcess):
    """The class of the Ray actor that starts and watches one core, which runs in a process of its
    own there and connects to the `addresses` of a front end.

    `vllm_config` is the plan, `dp_rank` the core's index. A front end gives its whole message as
    `start`, with the `environment` that the core is to have and the fields that are its `own`.
    `log_stats` and `local_dp_rank` change nothing: the front end logs, and Ray has chosen the
    place. Raises InvalidParameter for an `executor_class`: the plan says who runs the workers.
    """

    def __init__(
        self,
        vllm_config: EnginePlan,
        local_client: bool,
        addresses: EngineZmqAddresses,
        executor_class: type | None = None,
        log_stats: bool = True,
        dp_rank: int = 0,
        local_dp_rank: int = 0,
        *,
        start: bytes | None = None,
        environment: Mapping[str, str] = {},  # noqa: B006 (read only)
        own: Mapping[str, str] = {},  # noqa: B006 (read only)
    ) -> None:
        if executor_class is not None:
            hint = "Give EngineArgs distributed_executor_backend."
            raise InvalidParameter("executor_class", executor_class, "the plan names it", hint)
        if start is None:
            message = StartMessage(
                plan=vllm_config,
                engine_index=dp_rank,
                incarnation=1,
                addresses=addresses,
                is_headless=not local_client,
                num_cores=vllm_config.parallel.mesh.dp,
            )
            start = encode_start(completed(message))
        super().__init__(CORE_PROGRAM, start, environment, own)


class RayCores:
    """The places of an engine's cores in a Ray cluster, which this process is connected to.

    Raises InvalidParameter where Ray cannot be imported, or the cluster is too small.
    """

    def __init__(self, parallel: ParallelPlan) -> None:
        connect()
        self.address: str = parallel.data_parallel_address or own_address()
        self._bundles = _bundles(parallel)
        self._are_workers = parallel.has_ray_workers
        each = {"CPU": sum(bundle["CPU"] for bundle in self._bundles)}
        self._machines = CoreMachines(parallel.mesh.dp, parallel.data_parallel_size_local, each)
        self._name = f"quire_{secrets.token_hex(4)}"

    def place(self, engine_index: int, incarnation: int) -> OwnedProcess:
        """A process for the core: on its machine while that lives, after its own death on any."""
        from quire.clusters.ray_process import OwnBundles, RayProcess  # it imports Ray

        name = f"{self._name}_dp_rank_{engine_index}_{incarnation}"

        def nodes() -> Sequence[str] | None:
            return self._machines.of(engine_index) if incarnation == 1 else ()

        return RayProcess(
            name,
            DPEngineCoreActor,
            _arguments,
            room=OwnBundles(name, self._bundles, nodes, are_workers=self._are_workers),
            placement_s=FIRST_PLACEMENT_S if incarnation == 1 else NEXT_PLACEMENT_S,
        )


def _bundles(parallel: ParallelPlan) -> list[dict[str, float]]:
    """A core's resources: a CPU for each thread of workers, unless these are actors, too."""
    workers = parallel.mesh.world_size
    if parallel.has_ray_workers:
        return [{"CPU": float(parallel.num_threads)}] * workers
    return [{"CPU": float(parallel.num_threads * workers)}]


def _arguments(message: StartMessage) -> dict[str, Any]:
    return {
        "vllm_config": message.plan,
        "local_client": False,
        "addresses": message.addresses,
        "dp_rank": message.engine_index,
        "start": encode_start(message),
        "environment": carried_environment(),
    }
