"""A server for each copy of an engine on this machine, at ports one after the other, for whoever
balances outside: the process that starts them and tells of their health.

They know nothing of each other. One that ends is started again at its port, whose connections wait
meanwhile. A port of its own answers /health and /ready for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.config.args.server_args import ServerArgs
from quire.config.plan import EnginePlan
from quire.engine.event_loop import loop_factory
from quire.processes.child_process import ChildProcess
from quire.server.fleet.lives import CHECK_INTERVAL_S, SILENT_S, keep_alive, stop_all
from quire.server.fleet.port_server import ALIVE, READY, PortServerStart
from quire.server.http.failures import Refusal, error_response
from quire.server.http.listening import Listening, ShutdownSignal, Tls, address_of, make_listener

logger = logging.getLogger(__name__)

_MOST_ASKING = 64
"""Connections to the port that tells of all servers."""


def serve_at_ports(
    plan: EnginePlan,
    args: ServerArgs,
    keys: Sequence[str],
    listeners: Sequence[socket.socket],
    health_listener: socket.socket,
) -> int:
    """Serve with a server for each of `listeners`, the copies of this machine in their order, until
    a signal comes or one cannot be kept alive; the exit code.
    """
    servers = PortServers(plan, args, keys, listeners)
    try:
        servers.start()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(servers.run(health_listener))
    finally:
        servers.close()


@dataclass(slots=True)
class _Health:
    """The last report of a server, and when it came. `was_up`: it has served."""

    report: int = 0
    came_at: float = field(default_factory=time.monotonic)
    was_up: bool = False


class PortServers:
    """The processes of the servers, by their place on this machine."""

    def __init__(
        self,
        plan: EnginePlan,
        args: ServerArgs,
        keys: Sequence[str],
        listeners: Sequence[socket.socket],
    ) -> None:
        """`plan` has the ranks of all copies on this machine."""
        self._plan, self._args, self._keys = plan, args, keys
        self._listeners = listeners
        self._ranks = plan.parallel.data_parallel_ranks
        self._healths = [_Health() for _ in listeners]
        self._processes: list[ChildProcess] = []

    def start(self) -> None:
        """Start each server; all import at once."""
        for listener in self._listeners:
            listener.listen()  # clients that come early wait
            self._processes.append(self._process(listener))
        for place, process in enumerate(self._processes):
            process.start(self._message(place))

    async def run(self, health_listener: socket.socket) -> int:
        """Keep the servers alive until a signal comes; the exit code."""
        ending = ShutdownSignal()
        with ending.by_signals():
            teller = make_listener(self._health_app(), Listening(), _MOST_ASKING)
            telling = asyncio.ensure_future(teller.serve([health_listener]))
            keepers = [
                asyncio.ensure_future(self._keep(place, ending))
                for place in range(len(self._ranks))
            ]
            announcing = asyncio.ensure_future(self._announce(health_listener))
            try:
                await ending.begun.wait()
                announcing.cancel()
                drain_s = self._args.shutdown_timeout
                await stop_all(ending, keepers, lambda: self._processes, self._shut_down, drain_s)
            finally:
                teller.should_exit = teller.force_exit = True
                for task in (announcing, *keepers):
                    task.cancel()
                await asyncio.gather(telling, announcing, *keepers, return_exceptions=True)
        logger.info("Stopped.")
        return ending.exit_code

    def close(self) -> None:
        """Kill what is left. Idempotent."""
        while self._processes:
            self._processes.pop().end(0.0)

    # lives

    async def _keep(self, place: int, ending: ShutdownSignal) -> None:
        def on_death() -> None:
            if not self._healths[place].was_up:  # what kept it from that is in the log
                ending.fail()
            self._healths[place] = _Health(was_up=True)

        def again() -> ChildProcess:
            self._processes[place] = self._process(self._listeners[place])
            return self._processes[place]

        await keep_alive(
            f"The server of rank {self._ranks[place]}",
            self._processes[place],
            ending,
            live=partial(self._live, place),
            on_death=on_death,
            again=again,
            start=lambda process: process.start(self._message(place)),
        )

    async def _live(self, place: int, process: ChildProcess) -> None:
        """Return when the server has exited; one that reports nothing more is killed."""
        loop, pipe, health = asyncio.get_running_loop(), process.pipe, self._healths[place]
        pipe.setblocking(False)
        while True:
            began = time.monotonic()
            try:
                reports = await asyncio.wait_for(loop.sock_recv(pipe, 64), CHECK_INTERVAL_S * 2)
            except TimeoutError:
                was_asleep = time.monotonic() - began > CHECK_INTERVAL_S * 4
                if was_asleep or not health.was_up:
                    health.came_at = time.monotonic()
                elif time.monotonic() - health.came_at > SILENT_S:
                    logger.error(
                        "No report of the server of rank %d for %.0f s.",
                        self._ranks[place],
                        SILENT_S,
                    )
                    process.kill()
                continue
            except OSError:
                return
            if not reports:
                return
            health.report, health.came_at = reports[-1], time.monotonic()
            health.was_up |= bool(health.report & ALIVE)

    def _shut_down(self) -> None:
        """Have all servers stop; one that has not begun to serve has nothing to drain."""
        for process, health in zip(self._processes, self._healths, strict=True):
            if health.report & ALIVE:
                with suppress(OSError):
                    process.pipe.send(b"\0")
            else:
                process.kill()

    def _process(self, listener: socket.socket) -> ChildProcess:
        return ChildProcess("quire.server.fleet.port_server", [listener.fileno()])

    def _message(self, place: int) -> PortServerStart:
        listener = self._listeners[place]
        return PortServerStart(
            plan=self._plan.changed(data_parallel_ranks=(self._ranks[place],)),
            args=replace(self._args, port=listener.getsockname()[1]),
            keys=list(self._keys),
            listener_fd=listener.fileno(),
        )

    # health

    def _health_app(self) -> Starlette:
        async def answer(request: Request, bit: int) -> Response:
            now = time.monotonic()
            ailing = [
                str(listener.getsockname()[1])
                for listener, health in zip(self._listeners, self._healths, strict=True)
                if not health.report & bit or now - health.came_at > SILENT_S
            ]
            if not ailing:
                return Response()
            text = f"The servers at these ports are not: {', '.join(ailing)}."
            return error_response(Refusal(503, text, headers={"Retry-After": "1"}))

        bits = {"/health": ALIVE, "/ready": READY, "/readyz": READY}
        return Starlette(
            routes=[Route(path, partial(answer, bit=bit)) for path, bit in bits.items()]
        )

    async def _announce(self, health_listener: socket.socket) -> None:
        """Log the address of the health of all when they are up."""
        while not all(health.report & READY for health in self._healths):
            await asyncio.sleep(0.1)
        where = address_of(health_listener, Tls())
        logger.info("%d servers are up; %s/ready tells of all.", len(self._listeners), where)
