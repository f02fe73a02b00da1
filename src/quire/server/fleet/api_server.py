"""The program of one of several API servers, for cores that another process owns (fleet.py)."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from quire.config.args.server_args import ServerArgs
from quire.config.plan import EnginePlan
from quire.engine.async_llm import AsyncLLM
from quire.engine.client.client import AsyncEngineCoreClient
from quire.engine.client.kept_media import KeptMedia
from quire.engine.event_loop import freeze_start_up, loop_factory
from quire.engine.frontend.frontend import FrontEnd, build_front_end
from quire.engine.shared_cores import broker_messages as wire
from quire.engine.shared_cores.broker_client import CoreBrokerClient
from quire.engine.shared_cores.broker_stats import ApiServerStats
from quire.engine.shared_cores.load_board import LoadBoard, Neighbours
from quire.engine.wire.messages import PROTOCOL_VERSION
from quire.processes.child_main import SERVER_LOG_FORMAT, ChildProgram
from quire.processes.start_message import ChildStart
from quire.server.assemble import Siblings
from quire.server.context import Server
from quire.server.http.listening import ShutdownSignal
from quire.server.serving import serve

_LAST_STATS_S = 2.0
"""Time that the owner has to take the last statistics, in seconds."""


class ApiServerStart(ChildStart, kw_only=True):
    """Everything an API server must know. It is row `row` of `num_rows` on the board in `board_fd`;
    `listener_fd` and `admin_fd` are bound sockets.
    """

    protocol_version: int = PROTOCOL_VERSION
    plan: EnginePlan
    args: ServerArgs
    keys: list[str]
    client_index: int
    row: int
    num_rows: int
    board_fd: int
    listener_fd: int
    admin_fd: int | None = None


def _run(start: ApiServerStart, pipe: socket.socket) -> int:
    """Serve until the owner stops this process or exits; the exit code."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(start, pipe))


async def _serve(start: ApiServerStart, pipe: socket.socket) -> int:
    media = start.plan.media
    # the bound is that of the whole engine, whichever server the pictures come to
    share = None if media is None else KeptMedia(media.journal_bytes // start.num_rows)
    client = await CoreBrokerClient.open(pipe, share)
    ending = ShutdownSignal()
    stats = ApiServerStats(client)
    neighbours = Neighbours(LoadBoard(start.num_rows, start.board_fd), start.row)

    async def flush(args: list[Any]) -> None:
        client.report()

    async def shut_down(args: list[Any]) -> None:
        ending.on_signal()

    client.answerers[wire.FLUSH] = flush
    client.answerers[wire.SHUTDOWN] = shut_down
    client.collect = stats.take
    front_end: FrontEnd[AsyncEngineCoreClient] = build_front_end(
        start.plan, client, start.client_index, stats=stats
    )
    engine = AsyncLLM(
        front_end=front_end, log_requests=start.args.enable_log_requests, neighbours=neighbours
    )

    def on_started(server: Server) -> None:
        async def abort_shown(args: list[Any]) -> int:
            return await server.abort_here(args[0])

        client.answerers[wire.ABORT_SHOWN] = abort_shown
        client.set_up()

    siblings = Siblings(neighbours, client.abort_elsewhere, on_started)
    admin = None if start.admin_fd is None else socket.socket(fileno=start.admin_fd)
    try:
        # connections wait in the socket until there are cores to answer them
        await client.wait_until_open()
        freeze_start_up()
        listener = socket.socket(fileno=start.listener_fd)
        return await serve(engine, start.args, start.keys, listener, ending, admin, siblings)
    finally:
        client.report()
        engine.shutdown()
        await asyncio.wait([asyncio.ensure_future(client.wait_closed())], timeout=_LAST_STATS_S)


PROGRAM = ChildProgram(
    ApiServerStart, lambda start: f"ApiServer_{start.row}", _run, SERVER_LOG_FORMAT
)
