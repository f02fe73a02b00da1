"""The message that a core process is started with."""

from __future__ import annotations

from quire.config.plan import EnginePlan
from quire.engine.wire.messages import PROTOCOL_VERSION, EngineZmqAddresses
from quire.processes.start_message import ChildStart


class StartMessage(ChildStart, kw_only=True):
    """Everything a core process must know.

    `socket_folder` is removed by a core that outlives the front end. `server_key`: the public key
    of front ends that are not on this machine. `hosts_experts`: its last descriptor is the socket
    at which the cores that share experts meet. `ray_group`: the placement group whose bundles its
    workers get; "": the one that the plan names.
    """

    protocol_version: int = PROTOCOL_VERSION
    plan: EnginePlan
    engine_index: int
    incarnation: int
    addresses: EngineZmqAddresses
    socket_folder: str | None = None
    heartbeat_s: float = 0.5
    is_headless: bool = False
    server_key: bytes | None = None
    num_cores: int = 1
    hosts_experts: bool = False
    ray_group: str = ""
