"""What becomes of a start message: a core, with the loop that it needs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

from quire.config.plan import EnginePlan
from quire.distributed.expert_exchange import Group
from quire.engine.core.core import EngineCore
from quire.engine.data_parallel.lockstep_server import DPEngineCoreProc
from quire.engine.process.core_server import EngineCoreProc
from quire.engine.process.start_message import StartMessage
from quire.engine.process.step_board import StepBoard, board_path

LONGEST_WAIT_S = 330.0
"""A core that waits so long for the others of its group gives them up. That one of them is dead,
stopped, or longer than 300 s in a turn the front end notices before, and ends them all.
"""


class Builder(Protocol):
    """Builds a core, which may share its experts with a group."""

    def __call__(self, plan: EnginePlan, *, group: Group | None) -> EngineCore: ...


def make_core_proc(
    message: StartMessage,
    pipe: socket.socket,
    build: Builder,
) -> EngineCoreProc:
    """The core that the message describes, with its loop."""
    plan = message.plan
    core = build(plan, group=_group(message) if plan.enable_expert_parallel else None)
    if message.socket_folder is not None:
        index, incarnation = message.engine_index, message.incarnation
        path = board_path(Path(message.socket_folder), index, incarnation)
        core.on_launch = StepBoard(path, core.max_handles_in_flight).write
    kind = EngineCoreProc if core.lock_step is None else DPEngineCoreProc
    return kind(core, message, pipe)


def _group(message: StartMessage) -> Group:
    """Cores that share experts live and die together, so all are in a life of the same number."""
    from quire.distributed.gloo_group import GlooGroup  # imports that few cores need

    assert message.socket_folder is not None, "they are on the front end's machine"
    rendezvous = Path(message.socket_folder) / f"experts-{message.incarnation}"
    return GlooGroup(rendezvous, message.engine_index, message.data_parallel_size, LONGEST_WAIT_S)
