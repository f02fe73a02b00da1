"""The coordinator process as a front end sees it: started, read, restarted when it dies, ended."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from quire.engine.data_parallel.coordinator import CoordinatorMessage
from quire.engine.wire.messages import Counts, EngineZmqAddresses, SchedulerStats
from quire.errors import EngineDeadError
from quire.processes.child_process import ChildProcess, is_shortage
from quire.processes.cluster_keys import ClusterKeys
from quire.processes.codec import has_input
from quire.processes.listening import listening_at

logger = logging.getLogger(__name__)

SHORT_LIFE_S = 1.0
MAX_SHORT_LIVES = 5
"""Short lives in a row after which it is not restarted."""


class DPCoordinator:
    """One coordinator process after the other, at the same addresses: in `folder`, or, for cores on
    other machines, ports of `address`, whose listening sockets stay open here.
    """

    def __init__(
        self,
        folder: Path,
        num_cores: int,
        address: str | None = None,
        keys: ClusterKeys | None = None,
    ) -> None:
        """With `keys`, only cores that know the secret can connect."""
        places = ("waves-in", "waves-out", "counts")
        self._cores_in, self._cores_out, self._counts_out = (f"ipc://{folder}/{p}" for p in places)
        self._listeners: list[socket.socket] = []
        self._keys = keys
        if address is not None:
            self._listeners = [listening_at(address) for _ in range(2)]
            ports = [one.getsockname()[1] for one in self._listeners]
            self._cores_in, self._cores_out = (f"tcp://{address}:{port}" for port in ports)
        self._num_cores = num_cores
        self._context = zmq.Context(io_threads=1)
        self.counts: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        """Readable when the coordinator has published counts."""
        self.counts.linger = 0
        self.counts.subscribe(b"")
        self.counts.connect(self._counts_out)
        self._decoder = msgspec.msgpack.Decoder(Counts)
        self._num_short_lives = 0
        self.num_restarts = 0
        self.latest = Counts()
        self._start()

    def addresses(self, of_front_end: EngineZmqAddresses) -> EngineZmqAddresses:
        return msgspec.structs.replace(
            of_front_end, coordinator_input=self._cores_in, coordinator_output=self._cores_out
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def take(self, note: Callable[[int, SchedulerStats], None]) -> None:
        """Take in what has come; `note` gets each core's counts. A coordinator that has died is
        restarted, with another pipe. Raises EngineDeadError when it does not stay alive.
        """
        while has_input(self.counts):
            self.latest = self._decoder.decode(self.counts.recv(zmq.NOBLOCK))
            for engine_index, stats in self.latest.stats.items():
                note(engine_index, stats)
        if not self.process.is_running:
            self._restart()

    def close(self) -> None:
        self.process.end(0.0)
        for listener in self._listeners:
            listener.close()
        self._context.destroy(linger=0)

    def _restart(self) -> None:
        is_short = time.monotonic() - self._began < SHORT_LIFE_S
        num_short_lives = self._num_short_lives + 1 if is_short else 0
        dead, ending = self.process, self.process.exit_words()
        if num_short_lives >= MAX_SHORT_LIVES:
            raise EngineDeadError(f"The coordinator of the cores {ending} again and again.")
        try:
            self._start()
        except OSError as error:
            if not is_shortage(error):
                raise
            return  # the next look tries again
        logger.error("The DP coordinator %s; it was restarted.", ending)
        dead.end(0.0)
        self._num_short_lives = num_short_lives
        self.num_restarts += 1

    def _start(self) -> None:
        fds = [listener.fileno() for listener in self._listeners]
        self.process = ChildProcess("quire.engine.data_parallel.coordinator", fds)
        self._began = time.monotonic()
        self.process.start(
            CoordinatorMessage(
                cores_in=self._cores_in,
                cores_out=self._cores_out,
                counts_out=self._counts_out,
                num_cores=self._num_cores,
                listener_fds=(fds[0], fds[1]) if fds else None,
                keys=self._keys,
            )
        )
