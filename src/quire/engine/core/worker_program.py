"""The part of a plan that workers are built from, and the program of a rank's process."""

from __future__ import annotations

import os
import socket
from functools import partial

import msgspec

from quire.config.plan import EnginePlan
from quire.engine.event_loop import freeze_start_up
from quire.errors import EngineError
from quire.executor.ranks.messages import RankStart
from quire.executor.ranks.processes import rank_title
from quire.executor.worker_config import WorkerConfig
from quire.hardware.cpu_list import parse_cpus
from quire.processes.child_main import ChildProgram
from quire.processes.start_message import send_last_words
from quire.runner.sampling import find_logits_processors, make_logits_processors


def of_core(plan: EnginePlan, core: int, num_deaths: int = 0) -> EnginePlan:
    """The plan of one core, with its own workers' CPUs and sockets, after `num_deaths` deaths."""
    parallel = plan.parallel
    size = parallel.mesh.world_size
    first = core * size % len(parallel.thread_cpus)
    events = plan.memory.kv_events
    if events is not None:
        events = msgspec.structs.replace(events, rank=core, num_deaths=num_deaths)
    transfer = parallel.weight_transfer
    if transfer is not None:
        transfer = msgspec.structs.replace(transfer, core=core)
    connector = plan.memory.kv_connector
    return plan.changed(
        thread_cpus=parallel.thread_cpus[first : first + size],
        kv_events=events,
        kv_connector=None if connector is None else connector.of_rank(core),
        weight_transfer=transfer,
    )


def of_rank(plan: EnginePlan, rank: int) -> EnginePlan:
    """The plan of a rank, with its own region of memory that all of a core share."""
    plan = plan.changed(rank=rank)
    tier = plan.memory.kv_tier
    if tier is None:
        return plan
    return plan.changed(kv_tier=msgspec.structs.replace(tier, region=rank))


def cpus_of_core(plan: EnginePlan) -> frozenset[int]:
    """The logical CPUs of all workers of a core, whose own plan this is; empty: any."""
    lists = [parse_cpus(cpus) for cpus in plan.parallel.thread_cpus]
    return frozenset[int]().union(*lists) if all(lists) else frozenset()


def worker_config(plan: EnginePlan) -> WorkerConfig:
    """The part of a plan for workers. Raises InvalidParameter for an unknown logits processor."""
    processors = find_logits_processors(plan.sampling.logits_processors)
    return WorkerConfig(
        model=plan.model,
        parallel=plan.parallel,
        memory=plan.memory,
        steps=plan.steps,
        speculation=plan.speculation,
        adapters=plan.adapters,
        sampling=plan.sampling,
        make_processors=partial(make_logits_processors, processors, plan),
        plan=plan,
        program=__name__,
    )


class WorkerStart(RankStart, kw_only=True):
    """The start message of a rank, with the plan of its engine."""

    plan: EnginePlan


def _run(message: WorkerStart, pipe: socket.socket) -> int:
    from quire.executor.ranks.rank_main import run_rank  # a core needs what starts ranks alone

    try:
        plan = of_rank(message.plan, message.rank)
        run_rank(message, worker_config(plan), pipe, freeze_start_up)
    except Exception as error:
        send_last_words(pipe, error)
        if isinstance(error, EngineError):  # the core shows its text
            return 1
        raise
    os._exit(0)  # nothing is left to write, and to take torch apart takes as long as to import it


PROGRAM = ChildProgram(WorkerStart, lambda message: rank_title(message.rank), _run)
