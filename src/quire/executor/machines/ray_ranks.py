"""The ranks of a model on machines that Ray chooses: a process behind an actor for each."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from quire.clusters.hosted_process import HostedProcess
from quire.clusters.ray_cluster import WorkersGroup, own_address
from quire.clusters.ray_place import RayPlace
from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.mesh import Mesh
from quire.environment import carried_environment
from quire.executor.platform import Platform
from quire.executor.ranks.multiproc import MultiprocExecutor
from quire.executor.ranks.network_ranks import NetworkRanks
from quire.executor.worker_config import WorkerConfig
from quire.executor.worker_extension import worker_class
from quire.processes.owned_process import OwnedProcess
from quire.processes.start_message import ChildStart, encode_start

PLACEMENT_S = 60.0
"""Seconds that an actor may take to get its bundle of a group that is there."""


class RayWorkerActor(HostedProcess):
    """The class of the Ray actor that starts and watches one rank."""


class RayRanks(NetworkRanks):
    """Ranks in the bundles of a group, which is given back with them."""

    def __init__(
        self,
        group: WorkersGroup,
        start_process: Callable[[int], OwnedProcess],
        plan: Any,
        mesh: Mesh,
    ) -> None:
        self._group = group
        super().__init__(start_process, plan, mesh, (), own_address())

    def close(self) -> None:
        super().close()
        self._group.give_back()


class RayExecutor(MultiprocExecutor):
    """The ranks of a model in a placement group: one bundle for each, in its order."""

    uses_ray = True


def open_ray(
    config: WorkerConfig,
    *,
    platform: Platform | None = None,
    exchange: ExpertExchange | None = None,
) -> RayExecutor:
    """Start a rank in each bundle of the placement group that the plan names, or of a new one."""
    from quire.clusters.ray_process import BundleOf, RayProcess  # it imports Ray

    assert platform is None and exchange is None, "each rank opens the device that the plan names"
    parallel = config.parallel
    mesh = parallel.mesh
    group = WorkersGroup(parallel.ray or RayPlace(), mesh.world_size)
    name, environment = f"quire_Worker_{secrets.token_hex(4)}", carried_environment()

    def arguments(start: ChildStart) -> dict[str, Any]:
        return {"module": config.program, "start": encode_start(start), "environment": environment}

    def start_process(rank: int) -> OwnedProcess:
        place = mesh.place(rank)
        return RayProcess(
            f"{name}_PP{place.pp_rank}_TP{place.tp_rank}",
            RayWorkerActor,
            arguments,
            room=BundleOf(group.group, group.bundles[rank]),
            placement_s=PLACEMENT_S,
        )

    ranks = RayRanks(group, start_process, config.plan, mesh)
    kind = worker_class(parallel)
    return RayExecutor(ranks, kind, has_drafts=config.num_drafts > 0)
