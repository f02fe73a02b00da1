"""Clients of core processes without a front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quire.config.plan import EnginePlan
from quire.engine.client.multiprocess import AsyncMPClient, MPClient, SyncMPClient
from quire.engine.client.remote_cores import RemoteCores
from quire.engine.launcher import start

C = TypeVar("C", bound=MPClient)


def launch_sync(plan: EnginePlan, max_restarts: int = 0) -> SyncMPClient:
    return _launch(SyncMPClient, plan, max_restarts)


def launch_async(plan: EnginePlan, max_restarts: int = 0) -> AsyncMPClient:
    return _launch(AsyncMPClient, plan, max_restarts)


def _launch(make: Callable[[RemoteCores, int], C], plan: EnginePlan, max_restarts: int) -> C:
    client = make(start(plan), max_restarts)
    try:
        client.wait_until_ready()
    except BaseException:
        client.shutdown()
        raise
    return client
