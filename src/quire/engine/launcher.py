"""Starts the cores of a plan in processes of their own and gives the client that speaks to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.config.args.engine_args import EngineArgs
from quire.config.plan import EnginePlan
from quire.config.resolve.parallel import INTERNAL
from quire.engine.client.client import AsyncEngineCoreClient, EngineCoreClient
from quire.engine.client.connections import CoreLinks
from quire.engine.client.multiprocess import AsyncMPClient
from quire.engine.client.multiprocess_sync import SyncMPClient
from quire.engine.client.remote_cores import MPClient
from quire.engine.client.supervisor import AsyncSupervisor, SyncSupervisor
from quire.engine.data_parallel.cluster_keys import ClusterKeys, cluster_keys
from quire.engine.data_parallel.coordinator_client import DPCoordinator
from quire.engine.data_parallel.handshake import HandshakeServer
from quire.engine.frontend.frontend import FrontEnd, build_front_end
from quire.engine.process.core_pool import HEARTBEAT_S, CoreHost
from quire.engine.process.core_process import CoreProcess
from quire.engine.process.socket_folder import make_socket_folder, remove_socket_folder
from quire.engine.shared_cores.broker import CoreBroker
from quire.engine.stats.engine_stats import EngineStats
from quire.engine.stats.loggers import StatLoggerFactory, StatsOptions, with_stat_loggers
from quire.environment import read_environment

C = TypeVar("C", bound=MPClient)


def launch_front_end(
    wish: EngineArgs | EnginePlan,
    stat_loggers: Sequence[StatLoggerFactory] | None = None,
    is_log_aggregated: bool = False,
) -> FrontEnd[EngineCoreClient]:
    """A front end whose cores run in processes and are ready.

    From `EngineArgs` it is quicker: the first core imports while the plan is made, and the
    tokenizer is read while the cores load. Raises RequestError, LoadError, EngineDeadError.
    """
    return _launch_front_end(SyncMPClient, supervised, wish, stat_loggers, is_log_aggregated)


def launch_async_front_end(
    wish: EngineArgs | EnginePlan,
    stat_loggers: Sequence[StatLoggerFactory] | None = None,
    is_log_aggregated: bool = False,
) -> FrontEnd[AsyncEngineCoreClient]:
    """The same for an event loop."""
    return _launch_front_end(AsyncMPClient, supervised_async, wish, stat_loggers, is_log_aggregated)


def _launch_front_end(
    make: Callable[..., C],
    supervise: Callable[[EnginePlan, C], Any],
    wish: EngineArgs | EnginePlan,
    stat_loggers: Sequence[StatLoggerFactory] | None,
    is_log_aggregated: bool,
) -> FrontEnd[Any]:
    plan, stats_wish, client = _start_wish(make, wish, stat_loggers, is_log_aggregated)
    try:
        front_end = build_front_end(plan, supervise(plan, client), stats_wish=stats_wish)
        client.wait_until_ready()
    except BaseException:
        client.shutdown()
        raise
    return front_end


def _start_wish(
    make: Callable[..., C],
    wish: EngineArgs | EnginePlan,
    stat_loggers: Sequence[StatLoggerFactory] | None,
    is_log_aggregated: bool,
) -> tuple[EnginePlan, StatsOptions, C]:
    """The plan, what is to be told of it, and the client of its cores, which start."""
    first = CoreProcess()
    try:
        plan = wish if isinstance(wish, EnginePlan) else wish.create_engine_config()
        plan, stats_wish = with_stat_loggers(plan, stat_loggers, is_log_aggregated)
        return plan, stats_wish, start(make, plan, first)
    except BaseException:
        first.end(0.0)
        raise


@dataclass(frozen=True)
class OwnedCores:
    """The cores of a plan for several front ends in other processes, which `hub` joins to them.
    `client` is theirs without supervision: it waits for them, and ends them.
    """

    plan: EnginePlan
    client: AsyncMPClient
    hub: CoreBroker


def start_owned(
    wish: EngineArgs | EnginePlan, stat_loggers: Sequence[StatLoggerFactory] | None = None
) -> OwnedCores:
    """Begin to start the cores of a plan, which are not ready yet. Raises RequestError, LoadError,
    EngineDeadError.
    """
    plan, stats_wish, client = _start_wish(AsyncMPClient, wish, stat_loggers, False)
    stats = EngineStats.of_plan(plan, client.engine_indices, stats_wish)
    interval_s = read_environment().log_stats_interval_s if plan.log_stats else None
    return OwnedCores(plan, client, CoreBroker(supervised_async(plan, client), stats, interval_s))


def supervised(plan: EnginePlan, client: SyncMPClient) -> EngineCoreClient:
    """The client whose cores come back as the plan says."""
    if plan.max_core_restarts == 0:
        return client
    return SyncSupervisor(client, max_restarts=plan.max_core_restarts)


def supervised_async(plan: EnginePlan, client: AsyncMPClient) -> AsyncEngineCoreClient:
    """The same for an event loop."""
    if plan.max_core_restarts == 0:
        return client
    return AsyncSupervisor(client, max_restarts=plan.max_core_restarts)


def launch_sync(plan: EnginePlan) -> SyncMPClient:
    """A client for a thread; its cores are ready. Raises LoadError, EngineDeadError."""
    return _ready(start(SyncMPClient, plan))


def launch_async(plan: EnginePlan) -> AsyncMPClient:
    """A client for an event loop; its cores are ready. Raises LoadError, EngineDeadError."""
    return _ready(start(AsyncMPClient, plan))


def start(make: Callable[..., C], plan: EnginePlan, first: CoreProcess | None = None) -> C:
    """The client of the plan's cores, of which those on this machine have been started; none is
    ready yet.

    `first` is a process that was started ahead; it becomes this machine's first core. Raises
    InvalidParameter where cores on other machines are to come and no secret is set.
    """
    here = list(plan.data_parallel_ranks)
    missing = _missing(plan)
    keys = cluster_keys(read_environment().cluster_secret) if missing else None
    if first is not None and not here:
        first.end(0.0)
    folder = make_socket_folder()
    try:
        links = _links(plan, folder, keys)
        addresses, handshake, coordinator = links.addresses, None, None
        if plan.enable_expert_parallel:
            coordinator = DPCoordinator(folder, plan.data_parallel_size)
            addresses = coordinator.addresses(addresses)
        if keys is not None:
            endpoint = f"tcp://{plan.data_parallel_address}:{plan.data_parallel_rpc_port}"
            handshake = HandshakeServer(endpoint, keys, addresses, plan, missing)
    except BaseException:
        remove_socket_folder(folder)
        raise
    host = CoreHost(
        plan,
        addresses,
        here,
        data_parallel_size=plan.data_parallel_size,
        socket_folder=folder,
        first=first,
        heartbeat_s=HEARTBEAT_S,
        server_key=None if keys is None else keys.public,
    )
    client = make(links, host, folder=folder, handshake=handshake, coordinator=coordinator)
    try:
        client.start_cores(here)
    except BaseException:
        client.shutdown()
        raise
    return client


def _missing(plan: EnginePlan) -> list[int]:
    """The cores that come from other machines."""
    if plan.data_parallel_mode != INTERNAL:
        return []
    return [i for i in range(plan.data_parallel_size) if i not in plan.data_parallel_ranks]


def _links(plan: EnginePlan, folder: Path, keys: ClusterKeys | None) -> CoreLinks:
    if keys is None:
        return CoreLinks([f"ipc://{folder}/input-0"], [f"ipc://{folder}/output-0"], 0)
    endpoint = f"tcp://{plan.data_parallel_address}:*"
    return CoreLinks([endpoint], [endpoint], 0, keys)


def _ready(client: C) -> C:
    try:
        client.wait_until_ready()
    except BaseException:
        client.shutdown()
        raise
    return client
