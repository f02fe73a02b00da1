"""The main program of one of the servers that port_servers.py starts: a whole server, with the one
core that it has, at a port of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from quire.config.args.server_args import ServerArgs
from quire.config.plan import EnginePlan
from quire.engine.async_llm import AsyncLLM
from quire.engine.client.client import AsyncEngineCoreClient
from quire.engine.event_loop import freeze_start_up, loop_factory
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.launcher import launch_async_front_end
from quire.engine.wire.messages import PROTOCOL_VERSION
from quire.errors import EngineError
from quire.processes.child_main import SERVER_LOG_FORMAT, ChildProgram
from quire.processes.start_message import ORPHANED, ChildStart
from quire.server.http.listening import ShutdownSignal
from quire.server.serving import serve

logger = logging.getLogger(__name__)

REPORT_S = 1.0
"""Seconds between two reports of a server's health."""
ALIVE, READY = 1, 2
"""The bits of a report, which is one byte: what /health and /ready answer."""


class PortServerStart(ChildStart, kw_only=True):
    """Everything such a server must know: the plan has the one rank of its core."""

    protocol_version: int = PROTOCOL_VERSION
    plan: EnginePlan
    args: ServerArgs
    keys: list[str]
    listener_fd: int


def _run(start: PortServerStart, pipe: socket.socket) -> int:
    """Serve until the starter stops this process or exits; the exit code."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        front_end = launch_async_front_end(start.plan, waits=False)
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(_serve(start, front_end, pipe))
        finally:
            front_end.client.shutdown()
    except EngineError as error:
        logger.error("%s", error)
        return 1


async def _serve(
    start: PortServerStart, front_end: FrontEnd[AsyncEngineCoreClient], pipe: socket.socket
) -> int:
    engine = AsyncLLM(front_end=front_end, log_requests=start.args.enable_log_requests)
    freeze_start_up()
    ending = ShutdownSignal()
    loop = asyncio.get_running_loop()
    pipe.setblocking(False)

    def take() -> None:
        try:
            words = pipe.recv(64)
        except OSError:
            words = b""
        if not words:  # the starter has exited; the core notices that of this process
            os._exit(ORPHANED)
        for _ in words:
            ending.on_signal()

    loop.add_reader(pipe, take)
    reporting = asyncio.create_task(_report(engine, ending, pipe))
    try:
        listener = socket.socket(fileno=start.listener_fd)
        return await serve(engine, start.args, start.keys, listener, ending)
    finally:
        reporting.cancel()
        loop.remove_reader(pipe)
        engine.shutdown()


async def _report(engine: AsyncLLM, ending: ShutdownSignal, pipe: socket.socket) -> None:
    """Tell the starter the health of this server, again and again."""
    while True:
        is_up = not engine.is_loading
        report = ALIVE * (is_up and engine.is_alive())
        report |= READY * (is_up and engine.is_ready() and not ending.begun.is_set())
        try:
            pipe.send(bytes([report]))
        except BlockingIOError:
            logger.debug("The starter has not read the last reports.")
        await asyncio.sleep(REPORT_S)


def _title(start: PortServerStart) -> str:
    return f"Server_DP{start.plan.parallel.data_parallel_ranks[0]}"


PROGRAM = ChildProgram(PortServerStart, _title, _run, SERVER_LOG_FORMAT)
