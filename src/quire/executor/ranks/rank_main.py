"""A rank's process: it builds its worker, gives signs of life, and serves tasks."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

from quire.distributed.mesh import MeshPlace
from quire.errors import EngineDeadError
from quire.executor.platform import open_platform
from quire.executor.ranks.aside import serve_aside
from quire.executor.ranks.messages import RankStart
from quire.executor.ranks.rank_loop import RankLoop
from quire.executor.ranks.rounds import exchange_of
from quire.executor.ranks.wiring import SignsOfLife, open_signs, open_wiring
from quire.executor.uniproc import take_torch_threads
from quire.executor.worker_builder import build_worker
from quire.executor.worker_config import WorkerConfig
from quire.hardware.affinity import bind_thread
from quire.hardware.cpu_list import parse_cpus
from quire.hardware.native import find_native
from quire.models import read_spec
from quire.models.cutting.stages import stages_of
from quire.models.spec import PipelineStage
from quire.processes.start_message import ORPHANED

BEAT_S = 0.25
"""Seconds between two signs of life."""


def run_rank(
    start: RankStart, config: WorkerConfig, pipe: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Build the worker of a rank and serve until the core ends it. `on_ready` is called when the
    worker is built. Raises what keeps it from serving.
    """
    signs = open_signs(start)
    # before the worker is built, which may take minutes
    threading.Thread(target=_give_signs, args=(pipe, signs), name="signs", daemon=True).start()
    serve_rank(start, config, signs, on_ready)


def serve_rank(
    start: RankStart, config: WorkerConfig, signs: SignsOfLife, on_ready: Callable[[], None]
) -> None:
    """As `run_rank`, of a rank that gives signs already."""
    place = start.mesh.place(start.rank)
    bind_thread(parse_cpus(start.cpus))
    native, _ = find_native()
    take_torch_threads(config.parallel.num_threads if native is None else 1)
    wiring = open_wiring(start, place, config.torch_dtype, config.device_type)
    stage, at = stage_of(config, place), config.parallel.experts_at
    exchange = None
    if at is not None:
        exchange = exchange_of(config, at.open_group(place.rank), place.tp_rank, stage)
        # a rank that waits for other cores, or computes for them, is not behind
        exchange.while_waiting = exchange.note_done = signs.note_done
        if wiring.group is not None:
            exchange.give_up = wiring.group.abort
    worker = build_worker(
        config, open_platform(config), exchange=exchange, group=wiring.group, stage=stage
    )
    worker.rounds = exchange
    threading.Thread(
        target=serve_aside, args=(worker, wiring.aside), name="aside", daemon=True
    ).start()
    on_ready()
    loop = RankLoop(worker, place, wiring, note_done=signs.note_done, rounds=exchange)
    try:
        loop.run()
    finally:
        worker.close()
        wiring.close()


def stage_of(config: WorkerConfig, place: MeshPlace) -> PipelineStage | None:
    """The layers of the rank's stage; None: it has all."""
    if place.mesh.pp == 1:
        return None
    decoder = read_spec(config.model.hf_config, config.model.pooler)
    return stages_of(decoder, config.parallel.stage_layers)[place.pp_rank]


def _give_signs(pipe: socket.socket, signs: SignsOfLife) -> None:
    """Say that the process runs, and end it when its core has ended, whatever it is doing."""
    poll = select.poll()
    poll.register(pipe, 0)  # an end is reported in any case
    while True:
        if poll.poll(BEAT_S * 1000):
            os._exit(ORPHANED)
        try:
            signs.beat()
        except EngineDeadError:
            os._exit(ORPHANED)
