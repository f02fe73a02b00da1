"""A machine without a front end: its cores, or its ranks, serve one elsewhere while that lives."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.config.args.engine_args import EngineArgs
from quire.config.plan import EnginePlan
from quire.config.plan_parts import ParallelPlan
from quire.engine.data_parallel.handshake import HANDSHAKE_TIMEOUT_MINS, say_hello
from quire.engine.process.core_pool import CorePool
from quire.engine.wire.messages import Welcome
from quire.environment import read_environment
from quire.executor.machines.rank_host import RankHost
from quire.processes.child_process import GRACE_S
from quire.processes.cluster_keys import ClusterKeys, cluster_keys
from quire.processes.start_message import ORPHANED

logger = logging.getLogger(__name__)

LOOK_MS = 500

FAREWELL_S = 8.0
"""The time in which cores shut down after the front end has asked them to."""
UNREACHED_S = 1.0
"""The time in which the machine of a front end that has closed its socket says that nobody listens
there; one that says nothing is lost, and has asked for nothing.
"""


def run_headless(args: EngineArgs, timeout_s: float = HANDSHAKE_TIMEOUT_MINS * 60) -> int:
    """Run this machine's share of the cores, or of the ranks of one, until the front end ends them;
    the exit code.

    0: the front end or a signal ended them. 1: a core died; the others are ended too. 3: the
    front end is gone. Raises RequestError, LoadError, TimeoutError when no front end answers within
    `timeout_s`, EngineError when it refuses.
    """
    plan = args.create_engine_config(headless=True)
    keys = cluster_keys(read_environment().cluster_secret)
    if plan.parallel.spans_machines:
        return _host_ranks(plan.parallel, keys, timeout_s)
    context = zmq.Context(io_threads=1)
    endpoint = plan.parallel.hello_endpoint
    try:
        front_end, welcome = say_hello(context, endpoint, keys.public, plan, timeout_s)
        gone = front_end.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        pool = _start(plan, welcome, keys.public)
        with _shutdown_signal() as stop:
            return _serve(pool, gone, stop)
    finally:
        context.destroy(linger=0)


def _host_ranks(parallel: ParallelPlan, keys: ClusterKeys, timeout_s: float) -> int:
    host = RankHost.of_plan(parallel, keys.public)
    with _shutdown_signal() as stop:
        return host.run(stop, timeout_s)


def _start(plan: EnginePlan, welcome: Welcome, server_key: bytes) -> CorePool:
    assert welcome.addresses is not None, "an accepted peer gets addresses"
    pool = CorePool(
        plan,
        welcome.addresses,
        plan.parallel.data_parallel_ranks,
        num_cores=welcome.num_cores,
        is_headless=True,
        server_key=server_key,
    )
    for engine_index, incarnation in zip(
        plan.parallel.data_parallel_ranks, welcome.incarnations, strict=True
    ):
        # `start` counts on from here, to the number that the front end has given
        pool.incarnations[engine_index] = incarnation - 1
        pool.start(engine_index)
    return pool


def _serve(pool: CorePool, gone: zmq.Socket[bytes], stop: socket.socket) -> int:
    poller = zmq.Poller()
    poller.register(gone, zmq.POLLIN)
    poller.register(stop, zmq.POLLIN)
    running = dict(pool.processes)
    given_up_at, grace_s = math.inf, GRACE_S
    for process in running.values():
        poller.register(process.pipe, zmq.POLLIN)
    try:
        while running:
            seen = dict(poller.poll(LOOK_MS))
            if stop.fileno() in seen:
                return 0
            if gone in seen:
                event = recv_monitor_message(gone)["event"]
                if given_up_at == math.inf:
                    given_up_at, grace_s = time.monotonic() + UNREACHED_S, 0.0
                elif event == zmq.EVENT_CLOSED and not grace_s:
                    # its machine is there: it may have sent the cores a shutdown before it exited
                    given_up_at, grace_s = time.monotonic() + FAREWELL_S, GRACE_S
            if time.monotonic() > given_up_at:
                logger.error("The front end has exited: stopping its cores.")
                return ORPHANED
            for engine_index, process in list(running.items()):
                if process.is_running:
                    continue
                if process.exit_code != 0:
                    if given_up_at < math.inf:
                        return ORPHANED
                    logger.error("%s", pool.death_of(engine_index))
                    return 1
                poller.unregister(process.pipe)
                del running[engine_index]
        return 0
    finally:
        if grace_s:
            pool.ask_to_end()
        pool.end(grace_s)


@contextlib.contextmanager
def _shutdown_signal() -> Iterator[socket.socket]:
    """A socket that becomes readable on SIGTERM or SIGINT, if this is the main thread."""
    ours, theirs = socket.socketpair()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, lambda *_: os.write(theirs.fileno(), b"\0"))
    try:
        yield ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
