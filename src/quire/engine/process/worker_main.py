"""The program of a process that runs one rank of a model for its core."""

from __future__ import annotations

import os
import socket

from quire.config.plan import EnginePlan
from quire.engine.core.worker_parts import worker_config
from quire.engine.event_loop import freeze_start_up
from quire.errors import EngineError
from quire.executor.ranks.messages import RankStart
from quire.executor.ranks.processes import rank_title
from quire.executor.ranks.rank_main import run_rank
from quire.processes.child_main import ChildProgram
from quire.processes.start_message import send_last_words


class WorkerStart(RankStart, kw_only=True):
    """The start message of a rank, with the plan of its engine."""

    plan: EnginePlan


def _run(message: WorkerStart, pipe: socket.socket) -> int:
    try:
        run_rank(message, worker_config(message.plan), pipe, freeze_start_up)
    except Exception as error:
        send_last_words(pipe, error)
        if isinstance(error, EngineError):  # the core shows its text
            return 1
        raise
    os._exit(0)  # nothing is left to write, and to take torch apart takes as long as to import it


PROGRAM = ChildProgram(WorkerStart, lambda message: rank_title(message.rank), _run)
