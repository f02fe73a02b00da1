"""Starts the cores of a plan in processes of their own and gives the client that speaks to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quire.config.plan import EnginePlan
from quire.engine.core_host import HEARTBEAT_S, CoreHost
from quire.engine.core_links import CoreLinks
from quire.engine.core_process import CoreProcess
from quire.engine.mp_client import AsyncMPClient, MPClient, SyncMPClient
from quire.engine.protocol import EngineZmqAddresses
from quire.engine.socket_folder import make_socket_folder, remove_socket_folder

C = TypeVar("C", bound=MPClient)


def launch_sync(plan: EnginePlan, first: CoreProcess | None = None) -> SyncMPClient:
    """A client for a thread; its cores are ready. Raises LoadError, EngineDeadError."""
    return _launch(SyncMPClient, plan, first)


def launch_async(plan: EnginePlan, first: CoreProcess | None = None) -> AsyncMPClient:
    """A client for an event loop; its cores are ready. Raises LoadError, EngineDeadError."""
    return _launch(AsyncMPClient, plan, first)


def _launch(make: Callable[..., C], plan: EnginePlan, first: CoreProcess | None) -> C:
    """`first` is a process that was started while the plan was being made."""
    folder = make_socket_folder()
    try:
        client = _connect(make, plan, folder, first)
    except BaseException:
        remove_socket_folder(folder)
        if first is not None:
            first.end(0.0)
        raise
    try:
        for engine_index in range(1):
            client._start_core(engine_index)
        client.wait_until_ready()
    except BaseException:
        client.shutdown()
        raise
    return client


def _connect(
    make: Callable[..., C], plan: EnginePlan, folder: Path, first: CoreProcess | None
) -> C:
    addresses = EngineZmqAddresses([f"ipc://{folder}/input-0"], [f"ipc://{folder}/output-0"])
    links = CoreLinks(addresses.inputs, addresses.outputs, client_index=0)
    host = CoreHost(
        plan, addresses, [0], socket_folder=folder, first=first, heartbeat_s=HEARTBEAT_S
    )
    return make(links, host, folder=folder)
