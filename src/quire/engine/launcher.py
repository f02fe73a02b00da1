"""Starts the cores of a plan in processes of their own and gives the client that speaks to them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.config.args.engine_args import EngineArgs
from quire.config.plan import EnginePlan
from quire.config.plan_parts import ParallelPlan
from quire.config.resolve.parallel import EXTERNAL, INTERNAL
from quire.engine.client.client import AsyncEngineCoreClient, EngineCoreClient
from quire.engine.client.core_sockets import CoreSockets
from quire.engine.client.kept_media import KeptMedia
from quire.engine.client.multiprocess import AsyncMPClient, MPClient, SyncMPClient
from quire.engine.client.remote_cores import RemoteCores
from quire.engine.frontend.frontend import FrontEnd, build_front_end
from quire.engine.process.core_pool import CORE_PROGRAM, CorePool
from quire.engine.process.socket_folder import make_socket_folder, remove_socket_folder
from quire.engine.stats.engine_stats import EngineStats
from quire.engine.stats.loggers import StatLoggerFactory, StatsOptions, with_stat_loggers
from quire.environment import read_environment
from quire.errors import InvalidParameter
from quire.processes.child_process import ChildProcess
from quire.processes.listening import address_here, listening_at
from quire.processes.owner_signals import held_back

if TYPE_CHECKING:
    from quire.engine.data_parallel.core_actor import RayCores
    from quire.engine.shared_cores.broker import CoreBroker
    from quire.processes.cluster_keys import ClusterKeys

C = TypeVar("C", bound=MPClient)


def launch_front_end(
    args: EngineArgs | EnginePlan,
    stat_loggers: Sequence[StatLoggerFactory] | None = None,
    is_log_aggregated: bool = False,
) -> FrontEnd[EngineCoreClient]:
    """Start cores in processes of their own, and return their front end once they are ready.

    This is faster from `EngineArgs` than from a plan: the first core imports while the plan is
    made, and the tokenizer is read while the cores load. Raises RequestError, LoadError,
    EngineDeadError.
    """
    return _launch_front_end(SyncMPClient, args, stat_loggers, is_log_aggregated)


def launch_async_front_end(
    args: EngineArgs | EnginePlan,
    stat_loggers: Sequence[StatLoggerFactory] | None = None,
    is_log_aggregated: bool = False,
    *,
    waits: bool = True,
) -> FrontEnd[AsyncEngineCoreClient]:
    """Start the cores and build a front end for an event loop. Where it does not wait until they
    are ready, requests are kept until then, and a core that fails is one that has died.
    """
    return _launch_front_end(AsyncMPClient, args, stat_loggers, is_log_aggregated, waits=waits)


def _launch_front_end(
    make: Callable[[RemoteCores, int, KeptMedia | None], C],
    args: EngineArgs | EnginePlan,
    stat_loggers: Sequence[StatLoggerFactory] | None,
    is_log_aggregated: bool,
    waits: bool = True,
) -> FrontEnd[Any]:
    plan, options, client = _start_cores(make, args, stat_loggers, is_log_aggregated)
    try:
        front_end = build_front_end(plan, client, stats_options=options)
        if waits:
            client.wait_until_ready()
    except BaseException:
        client.shutdown()
        raise
    return front_end


def _start_cores(
    make: Callable[[RemoteCores, int, KeptMedia | None], C],
    args: EngineArgs | EnginePlan,
    stat_loggers: Sequence[StatLoggerFactory] | None,
    is_log_aggregated: bool,
) -> tuple[EnginePlan, StatsOptions, C]:
    """The plan, what is logged of it, and the client of its cores, which are starting."""
    # before the plan is made: the process imports meanwhile
    first = ChildProcess(CORE_PROGRAM)
    try:
        if isinstance(args, EnginePlan):
            plan = args
        else:
            plan = args.create_engine_config()
            is_log_aggregated |= args.aggregate_engine_logging
        plan, options = with_stat_loggers(plan, stat_loggers, is_log_aggregated)
        media = None if plan.media is None else KeptMedia(plan.media.journal_bytes)
        return plan, options, make(start(plan, first), plan.parallel.max_core_restarts, media)
    except BaseException:
        first.end(0.0)
        raise


@dataclass(frozen=True)
class OwnedCores:
    """The cores of a plan for several front ends in other processes, which reach them
    through `broker`.
    """

    plan: EnginePlan
    client: AsyncMPClient
    broker: CoreBroker


def start_owned(
    args: EngineArgs | EnginePlan, stat_loggers: Sequence[StatLoggerFactory] | None = None
) -> OwnedCores:
    """Begin to start the cores of a plan, which are not ready yet. Raises RequestError, LoadError,
    EngineDeadError.
    """
    from quire.engine.shared_cores.broker import CoreBroker  # few cores have several front ends

    plan, options, client = _start_cores(AsyncMPClient, args, stat_loggers, False)
    stats = EngineStats.of_plan(plan, client.engine_indices, options)
    interval_s = read_environment().log_stats_interval_s if plan.serving.log_stats else None
    return OwnedCores(plan, client, CoreBroker(client, stats, interval_s))


@held_back()
def start(plan: EnginePlan, first: ChildProcess | None = None) -> RemoteCores:
    """The plan's cores, of which those on this machine have been started; none is ready yet.

    `first` is a process that was started ahead; it becomes this machine's first core. Raises
    InvalidParameter where cores on other machines are to come and no secret is set, or where each
    core here is to have a server of its own.
    """
    parallel = plan.parallel
    here = list(parallel.data_parallel_ranks)
    if parallel.data_parallel_mode == EXTERNAL and len(here) > 1:
        name, allowed = "data_parallel_multi_port_external_lb", "each copy has a server of its own"
        raise InvalidParameter(name, True, allowed, "Use quire serve, which starts them.")
    missing = _missing(plan)
    ray = _ray_cores(parallel) if parallel.data_parallel_backend == "ray" else None
    if first is not None and (ray is not None or not here):
        first.end(0.0)
        first = None
    address = parallel.data_parallel_address if ray is None else ray.address
    keys = _keys(is_shared=bool(missing)) if missing or ray is not None else None
    if keys is not None and address is not None:
        address = address_here("data_parallel_address", address)
    experts = coordinator = None
    folder = make_socket_folder()
    try:
        sockets = _sockets(address, folder, keys)
        addresses, handshake = sockets.addresses, None
        if parallel.is_lock_step:
            from quire.engine.data_parallel.coordinator_client import DPCoordinator

            elsewhere = address if missing else None
            coordinator = DPCoordinator(folder, parallel.mesh.dp, elsewhere, keys)
            addresses = coordinator.addresses(addresses)
            if elsewhere is not None:
                experts = listening_at(elsewhere)
                place = f"{elsewhere}:{experts.getsockname()[1]}"
                addresses = msgspec.structs.replace(addresses, experts=place)
        if keys is not None and missing:
            from quire.engine.data_parallel.handshake import HandshakeServer

            endpoint = f"tcp://{address}:{parallel.data_parallel_rpc_port}"
            handshake = HandshakeServer(endpoint, keys, addresses, plan, missing)
    except BaseException:
        # the port of the handshake may be another program's
        if coordinator is not None:
            coordinator.close()
        if experts is not None:
            experts.close()
        remove_socket_folder(folder)
        raise
    pool = CorePool(
        plan,
        addresses,
        here,
        num_cores=parallel.mesh.dp,
        socket_folder=folder,
        first=first,
        server_key=None if keys is None else keys.public,
        place=None if ray is None else ray.place,
        experts=experts,
    )
    cores = RemoteCores(sockets, pool, folder=folder, handshake=handshake, coordinator=coordinator)
    try:
        for engine_index in here:
            cores.start_core(engine_index)
    except BaseException:
        cores.shutdown()
        raise
    return cores


def _ray_cores(parallel: ParallelPlan) -> RayCores:
    from quire.engine.data_parallel.core_actor import RayCores  # few engines are on a cluster

    return RayCores(parallel)


def _missing(plan: EnginePlan) -> list[int]:
    parallel = plan.parallel
    if parallel.data_parallel_mode != INTERNAL:
        return []
    here = parallel.data_parallel_ranks
    return [i for i in range(parallel.mesh.dp) if i not in here]


def _keys(*, is_shared: bool) -> ClusterKeys:
    """The keys for cores on other machines: of a secret that these know, too, or where Ray tells
    them, of one that nobody else needs to know.
    """
    from quire.processes.cluster_keys import cluster_keys

    given = read_environment().cluster_secret
    return cluster_keys(given if is_shared or given else secrets.token_hex(32))


def _sockets(address: str | None, folder: Path, keys: ClusterKeys | None) -> CoreSockets:
    if keys is None:
        return CoreSockets(f"ipc://{folder}/input", f"ipc://{folder}/output")
    endpoint = f"tcp://{address}:*"
    return CoreSockets(endpoint, endpoint, keys)
