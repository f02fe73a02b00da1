"""The program of a machine that has some of a model's ranks: it starts and ends them as the core on
the first machine says (node_ranks.py), for as long as that lives.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Self

import msgspec
import zmq

from quire.config.plan_parts import ParallelPlan
from quire.encodable import to_msgpack
from quire.errors import EngineError
from quire.executor.machines.node_messages import (
    BEAT_S,
    PROTOCOL_VERSION,
    SILENT_S,
    CoreBeat,
    FromCore,
    FromNode,
    KillRank,
    NodeBeat,
    RankEnded,
    StartRank,
    node_identity,
)
from quire.processes.child_process import ChildProcess
from quire.processes.cluster_keys import introduce
from quire.processes.codec import has_input
from quire.processes.start_message import ORPHANED

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Seconds that a machine waits for its core, at first and where it is lost."""
FAREWELL_S = 30.0
"""Seconds that it waits for the next life of a core that has closed its ranks: one that failed is
restarted by then.
"""


class RankHost:
    """Machine `node` of `num_nodes`, whose core is at `endpoint`.

    A core that is silent for `SILENT_S`, or that has begun another life, has lost the ranks here:
    they are killed. `run` serves one core after the other.
    """

    def __init__(
        self,
        endpoint: str,
        server_key: bytes,
        node: int,
        num_nodes: int,
        cpus: Sequence[str] = ("",),
    ) -> None:
        """`cpus` lists the logical CPUs of the threads of each rank here; "": any."""
        self._endpoint, self._cpus = endpoint, cpus
        self._beat = NodeBeat(PROTOCOL_VERSION, node, num_nodes, secrets.token_hex(8))
        self._core_life = ""
        self._core_seen = time.monotonic()
        self._has_met = self._is_over = False
        self._ranks: dict[int, ChildProcess] = {}
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = node_identity(node, self._beat.life)
        self._socket.linger = 0
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 100, 1000
        introduce(self._socket, server_key)
        self._socket.connect(endpoint)

    @classmethod
    def of_plan(cls, parallel: ParallelPlan, server_key: bytes) -> Self:
        """The host of this machine's ranks."""
        endpoint = f"tcp://{parallel.master_addr}:{parallel.master_port}"
        cpus = parallel.thread_cpus
        return cls(endpoint, server_key, *parallel.node_place, cpus)

    def run(self, stop: socket.socket, patience_s: float = PATIENCE_S) -> int:
        """Serve until `stop` is readable or the core has ended and does not come back (0), or none
        has been there for `patience_s` (3).

        Raises TimeoutError where none has ever been, EngineError where one refuses this machine.
        """
        try:
            return self._serve(stop, patience_s)
        finally:
            self._end_ranks()
            self._context.destroy(linger=0)

    def _serve(self, stop: socket.socket, patience_s: float) -> int:
        beaten_at = 0.0
        while True:
            now = time.monotonic()
            if now - beaten_at >= BEAT_S:
                self._send(self._beat)
                beaten_at = now
            if self._is_stopped(stop):
                return 0
            while has_input(self._socket):
                self._take(self._socket.recv(zmq.NOBLOCK))
            self._report_ends()
            silent_s = time.monotonic() - self._core_seen
            # the core counts this machine as lost after the same time
            if silent_s > SILENT_S and self._ranks:
                logger.error("No sign of the core for %.0f s: its ranks here end.", silent_s)
                self._end_ranks()
            if self._is_over and silent_s > FAREWELL_S:
                return 0
            if silent_s > patience_s:
                if self._has_met:
                    logger.error("The core is gone.")
                    return ORPHANED
                raise TimeoutError(
                    f"No core answered at {self._endpoint} within {patience_s:g} s. Is it there, "
                    "and does it have the same QUIRE_CLUSTER_SECRET?"
                )

    def _is_stopped(self, stop: socket.socket) -> bool:
        """Wait for the next event, a beat's time at most."""
        poller = zmq.Poller()
        for each in (self._socket, stop, *(process.pipe for process in self._ranks.values())):
            poller.register(each, zmq.POLLIN)
        return stop.fileno() in dict(poller.poll(int(BEAT_S * 1000)))

    def _take(self, data: bytes) -> None:
        message = self._decoder.decode(data)
        if isinstance(message, StartRank):
            process = self._ranks[message.rank] = ChildProcess(message.program)
            cpus = self._cpus[message.rank % len(self._cpus)]  # as many as there are ranks here
            process.forward(message.start, cpus=cpus)
        elif isinstance(message, KillRank):
            # it may have ended by itself meanwhile
            if message.rank in self._ranks:
                self._ranks.pop(message.rank).end(0.0)
        else:
            self._note(message)

    def _note(self, beat: CoreBeat) -> None:
        if beat.refusal:
            raise EngineError(f"The core refused this machine: {beat.refusal}.")
        # ranks of an earlier life of the core have nobody who reads their links
        if beat.life != self._core_life:
            self._end_ranks()
            logger.info("Machine %d serves the core at %s.", self._beat.node, self._endpoint)
        self._core_life, self._core_seen, self._has_met = beat.life, time.monotonic(), True
        self._is_over = beat.is_over

    def _report_ends(self) -> None:
        for rank, process in list(self._ranks.items()):
            if not process.is_running:
                words, last_words = process.exit_words(), process.last_words()
                code = process.exit_code
                self._send(RankEnded(rank, 1 if code is None else code, words, last_words))
                del self._ranks[rank]
                process.end(0.0)

    def _end_ranks(self) -> None:
        while self._ranks:
            self._ranks.popitem()[1].end(0.0)

    def _send(self, message: FromNode) -> None:
        try:
            self._socket.send(to_msgpack(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("A message to the core is left out: it is not there.")
