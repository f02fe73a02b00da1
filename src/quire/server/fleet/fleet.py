"""Several API servers for the cores of one engine: the process that owns them all.

It answers no HTTP itself. It owns the cores and the broker (engine/shared_cores/broker.py), the
listening sockets and the servers' processes. A server that dies is restarted and loses its own
streams only: connections that it had not accepted wait in its socket, which stays open here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from functools import partial

from quire.config.args.engine_args import EngineArgs
from quire.config.args.server_args import ServerArgs
from quire.config.plan import EnginePlan
from quire.engine.event_loop import loop_factory
from quire.engine.launcher import OwnedCores, start_owned
from quire.engine.shared_cores.broker import ApiServerConnection
from quire.engine.shared_cores.load_board import Load, LoadBoard
from quire.errors import EngineDeadError
from quire.processes.child_process import ChildProcess
from quire.server.assemble import listening_of
from quire.server.fleet.api_server import ApiServerStart
from quire.server.fleet.lives import CHECK_INTERVAL_S, SILENT_S, keep_alive, stop_all
from quire.server.http.listening import ShutdownSignal, address_of

logger = logging.getLogger(__name__)


def serve_with_many(
    engine_args: EngineArgs,
    args: ServerArgs,
    keys: Sequence[str],
    listeners: Sequence[socket.socket],
    admin_listener: socket.socket | None = None,
) -> int:
    """Serve with a process for each of `listeners`, which are at one address, until a signal comes
    or the engine dies; the exit code. Administration at a port of its own is the first's.

    Raises RequestError, LoadError, EngineDeadError.
    """
    owned = start_owned(engine_args)
    fleet = Fleet(owned, args, keys, listeners, admin_listener)
    try:
        fleet.start()  # the servers load while the cores do
        owned.client.wait_until_ready()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(fleet.run())
    finally:
        fleet.close()
        owned.client.shutdown()


class ApiServerProcess(ChildProcess):
    """One process of an API server, known to the broker by `client_index`."""

    def __init__(self, client_index: int, fds: Sequence[int]) -> None:
        super().__init__("quire.server.fleet.api_server", fds)
        self.client_index = client_index


class Fleet:
    """The processes of all servers, by row of the load board: started, restarted, stopped."""

    def __init__(
        self,
        owned: OwnedCores,
        args: ServerArgs,
        keys: Sequence[str],
        listeners: Sequence[socket.socket],
        admin_listener: socket.socket | None,
    ) -> None:
        self._plan: EnginePlan = owned.plan
        self._broker = owned.broker
        self._args = args
        self._keys = keys
        self._listeners = listeners
        self._admin_listener = admin_listener
        self._board = LoadBoard(len(listeners))
        self._processes: dict[int, ApiServerProcess] = {}
        self._connections: dict[int, ApiServerConnection] = {}

    def start(self) -> None:
        """Start each server. They wait for `run`."""
        rows = range(len(self._listeners))
        self._processes = {row: self._new_process(row) for row in rows}  # all import at once
        for row, process in self._processes.items():
            process.start(self._message(row, process.client_index))

    async def run(self) -> int:
        """Serve until a signal comes or the engine is dead; the exit code."""
        ending = ShutdownSignal()
        with ending.by_signals():
            await self._serve(ending)
        logger.info("Stopped.")
        return ending.exit_code

    async def _serve(self, ending: ShutdownSignal) -> None:
        """Route between servers and cores, and keep the servers alive, until `ending` begins."""
        broker = asyncio.ensure_future(self._run_broker(ending))
        keepers = [asyncio.ensure_future(self._keep(row, ending)) for row in self._processes]
        announcing = asyncio.ensure_future(self._announce())
        try:
            await ending.begun.wait()
            announcing.cancel()
            await stop_all(
                ending,
                keepers,
                lambda: self._processes.values(),
                self._shut_down,
                self._args.shutdown_timeout,
            )
        finally:
            for task in (broker, announcing, *keepers):
                task.cancel()
            await asyncio.gather(broker, announcing, *keepers, return_exceptions=True)

    def close(self) -> None:
        """Kill what is left. Idempotent."""
        for process in self._processes.values():
            process.end(0.0)
        self._processes.clear()
        self._board.close()

    # restarts

    async def _run_broker(self, ending: ShutdownSignal) -> None:
        try:
            await self._broker.run()
        except EngineDeadError as error:
            logger.error("The engine is dead: %s", error)
            ending.fail()

    async def _keep(self, row: int, ending: ShutdownSignal) -> None:
        await keep_alive(
            f"API server {row}",
            self._processes[row],
            ending,
            live=partial(self._live, row),
            on_death=lambda: self._board.write(row, Load()),
            again=partial(self._replaced, row),
            start=lambda process: process.start(self._message(row, process.client_index)),
        )

    def _replaced(self, row: int) -> ApiServerProcess:
        process = self._processes[row] = self._new_process(row)
        return process

    async def _live(self, row: int, process: ApiServerProcess) -> None:
        """Return when the server has exited; one without heartbeats is killed."""
        lost = asyncio.Event()
        connection = await self._broker.join(process.client_index, process.pipe, lost.set)
        self._connections[row] = connection
        checked_at = time.monotonic()
        while not lost.is_set():
            await asyncio.wait(
                [waiting := asyncio.ensure_future(lost.wait())], timeout=CHECK_INTERVAL_S
            )
            waiting.cancel()
            now = time.monotonic()
            # after a stop of this process all servers look silent
            was_asleep, checked_at = now - checked_at > 2 * CHECK_INTERVAL_S, now
            if not was_asleep and now - connection.last_sign > SILENT_S:
                logger.error("No heartbeat from API server %d for %.0f s.", row, SILENT_S)
                process.kill()

    def _new_process(self, row: int) -> ApiServerProcess:
        fds = [self._board.fd, self._listeners[row].fileno()]
        if row == 0 and self._admin_listener is not None:
            fds.append(self._admin_listener.fileno())
        return ApiServerProcess(self._broker.new_index(), fds)

    def _message(self, row: int, client_index: int) -> ApiServerStart:
        admin = self._admin_listener if row == 0 else None
        return ApiServerStart(
            plan=self._plan,
            args=self._args,
            keys=list(self._keys),
            client_index=client_index,
            row=row,
            num_rows=len(self._listeners),
            board_fd=self._board.fd,
            listener_fd=self._listeners[row].fileno(),
            admin_fd=None if admin is None else admin.fileno(),
        )

    # beginning and end

    async def _announce(self) -> None:
        """Log the address when all servers accept connections."""
        while len(self._connections) < len(self._listeners) or not all(
            connection.is_up for connection in self._connections.values()
        ):
            await asyncio.sleep(0.02)
        tls = listening_of(self._args).tls
        if self._admin_listener is not None:
            logger.info("Administration at %s", address_of(self._admin_listener, tls))
        name, where = self._plan.model.served_model_names[0], address_of(self._listeners[0], tls)
        logger.info("%d API servers are up.", len(self._listeners))
        logger.info("Serving %s at %s", name, where)

    def _shut_down(self) -> None:
        """Have all servers stop; one that takes no connections yet has nothing to drain."""
        for process in self._processes.values():
            connection = self._broker.servers.get(process.client_index)
            # it may have requests, which it drains itself
            if connection is not None and connection.is_up:
                self._broker.shut_down(connection)
            else:
                process.kill()
