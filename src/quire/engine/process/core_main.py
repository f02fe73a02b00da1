"""The program of a core process. Importing it takes a second, in which the front end decides what
to start.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Protocol

import msgspec

from quire.clusters.ray_place import RayPlace
from quire.config.plan import EnginePlan
from quire.distributed.expert_exchange import Group
from quire.distributed.mesh import ExpertsPlace
from quire.engine.core.builder import build_core
from quire.engine.core.core import EngineCore
from quire.engine.core.worker_program import cpus_of_core, of_core
from quire.engine.event_loop import freeze_start_up
from quire.engine.process.core_server import EngineCoreProc
from quire.engine.process.liveness import PEERS_LOST
from quire.engine.process.lockstep_server import DPEngineCoreProc
from quire.engine.process.start_message import StartMessage
from quire.engine.process.step_board import StepBoard, board_path
from quire.errors import EngineError, PeersLost
from quire.hardware.affinity import bind_thread
from quire.processes.child_main import ChildProgram
from quire.processes.start_message import send_last_words

logger = logging.getLogger(__name__)


class Builder(Protocol):
    """Builds a core, which may share its experts with a group."""

    def __call__(self, plan: EnginePlan, *, group: Group | None) -> EngineCore: ...


def core_program(build: Builder) -> ChildProgram[StartMessage]:
    """The program of a process whose core is built by `build`."""

    def run(message: StartMessage, pipe: socket.socket) -> int:
        try:
            proc = _core_proc(message, pipe, build)
        except Exception as error:
            send_last_words(pipe, error)
            if isinstance(error, PeersLost):
                return PEERS_LOST
            if isinstance(error, EngineError):  # the front end shows its text
                return 1
            raise
        freeze_start_up()
        code = proc.run()
        if code:
            logging.shutdown()
            os._exit(code)  # its successor waits for its end, and Ray and torch take seconds to end
        return code

    return ChildProgram(StartMessage, _title, run)


def _title(message: StartMessage) -> str:
    several = message.num_cores > 1 or message.engine_index > 0
    return f"EngineCore_DP{message.engine_index}" if several else "EngineCore"


def _core_proc(message: StartMessage, pipe: socket.socket, build: Builder) -> EngineCoreProc:
    """The core that the message describes, with its loop."""
    plan = of_core(message.plan, message.engine_index, message.incarnation - 1)
    memory = message.fds[: len(message.fds) - message.hosts_experts]
    if plan.memory.kv_tier is not None and memory:
        tier = msgspec.structs.replace(plan.memory.kv_tier, memory_fd=memory[0])
        plan = plan.changed(kv_tier=tier)
    if message.ray_group:
        place = plan.parallel.ray or RayPlace()
        plan = plan.changed(ray=msgspec.structs.replace(place, group=message.ray_group))
    bind_thread(cpus_of_core(plan))
    group: Group | None = None
    store = None
    if plan.parallel.is_lock_step:
        experts_at = _experts_place(message)
        fd = message.fds[-1] if message.hosts_experts else None
        if plan.parallel.mesh.world_size == 1:
            group = experts_at.open_group(listener_fd=fd)
        else:
            plan = plan.changed(experts_at=experts_at)
            store = None if fd is None else experts_at.meeting(0, fd)
    core = build(plan, group=group)
    kind = EngineCoreProc if core.lock_step is None else DPEngineCoreProc
    proc = kind(core, message, pipe)
    if isinstance(proc, DPEngineCoreProc):
        proc.store = store
    # workers that die while nothing is asked of them are noticed by the executor alone
    core.executor.register_failure_callback(proc.on_executor_failure)
    if message.socket_folder is not None:
        index, incarnation = message.engine_index, message.incarnation
        path = board_path(Path(message.socket_folder), index, incarnation)
        try:
            board = StepBoard(path, core.max_handles_in_flight)
        except OSError as error:
            logger.warning("No record of the requests in a step, should this core die: %s", error)
        else:
            core.on_launch, proc.on_intake = board.write, board.note_intake
    return proc


def _experts_place(message: StartMessage) -> ExpertsPlace:
    """The place of the cores that share experts; all of them have the same incarnation number."""
    return ExpertsPlace(
        f"experts-{message.incarnation}",
        message.engine_index,
        message.num_cores,
        message.addresses.experts,
        message.socket_folder,
    )


def build_warm_core(plan: EnginePlan, *, group: Group | None) -> EngineCore:
    """Build a core that has run steps already, so that its first request waits for none of what is
    done once.
    """
    core = build_core(plan, group=group)
    is_free = not plan.parallel.is_lock_step
    if is_free and (plan.parallel.has_one_worker or plan.speculation is None):
        try:
            core.executor.collective_rpc("run_first_steps", (), {})
        except Exception:
            logger.warning("The steps before the first request failed.", exc_info=True)
    return core


PROGRAM = core_program(build_warm_core)
