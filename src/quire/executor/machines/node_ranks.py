"""The ranks of a model on several machines that were told of each other: a core on the first starts
them by way of a program on each of the others (rank_host.py).
"""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.mesh import Mesh
from quire.encodable import to_msgpack
from quire.environment import read_environment
from quire.errors import InvalidParameter
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
from quire.executor.platform import Platform
from quire.executor.ranks.multiproc import MultiprocExecutor, open_multiproc
from quire.executor.ranks.network_ranks import NetworkRanks
from quire.executor.worker_config import WorkerConfig
from quire.executor.worker_extension import worker_class
from quire.processes.child_process import ChildProcess, completed
from quire.processes.cluster_keys import ClusterKeys, close_to_strangers, cluster_keys
from quire.processes.codec import has_input
from quire.processes.distant_process import DistantProcess, Ending
from quire.processes.listening import address_here
from quire.processes.owned_process import OwnedProcess
from quire.processes.start_message import ChildStart, encode_start

logger = logging.getLogger(__name__)

_FAREWELL_MS = 1000
RIVAL_S = 3 * BEAT_S
"""A machine gives a sign within this time, unless it has ended or the network is slow."""


class NodeProcess(DistantProcess):
    """A rank on another machine; as OwnedProcess."""

    pid = 0

    def __init__(self, nodes: OtherMachines, node: int, rank: int, program: str) -> None:
        super().__init__()
        self.node, self.rank = node, rank
        self._nodes, self._program = nodes, program

    def start(self, message: ChildStart, fds: Sequence[int] = ()) -> None:
        """As `OwnedProcess.start`; it takes effect when the machine is there."""
        assert not fds, "descriptors stay on their machine"
        start = encode_start(completed(message))
        self._nodes.send(self, StartRank(self.rank, self._program, start))

    def ask_to_end(self) -> None:
        """Do nothing: its core closes the link, which ends it."""

    def kill(self) -> None:
        if self.is_running:
            self._nodes.send(self, KillRank(self.rank))
            # at once: the machine may be gone, and would never confirm it
            self.finish(Ending(-signal.SIGKILL, "was killed by SIGKILL", None))

    def end(self, timeout_s: float) -> None:
        self._ended.wait(max(timeout_s, 0.0))
        self.kill()
        self.pipe.close()


class OtherMachines:
    """The other machines of a core, which connect to `address`:`port` and prove that they know the
    secret. A thread speaks to them.

    A machine that is silent for `SILENT_S`, or that has begun another life, has lost its ranks.
    """

    def __init__(self, address: str, port: int, keys: ClusterKeys, num_nodes: int) -> None:
        self._life = secrets.token_hex(8)
        self._num_nodes = num_nodes
        self._lives: dict[int, str] = {}
        self._signs: dict[int, float] = {}
        self._rivals: dict[str, float] = {}
        """Since when a machine has given signs whose number another one has, by its life."""
        self._processes: dict[int, NodeProcess] = {}
        self._waiting: list[tuple[NodeProcess, FromCore]] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._decoder = msgspec.msgpack.Decoder(FromNode)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = _FAREWELL_MS
        # a machine that connects again may be faster than the end of its old connection, which has
        # its name
        self._socket.router_handover = True
        close_to_strangers(self._socket, keys)
        try:
            self._socket.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            allowed = f"the first machine cannot listen there: {error}"
            hint = "Give an address of that machine, and a port that is free."
            raise InvalidParameter("master_addr", f"{address}:{port}", allowed, hint) from error
        # a socket of ZeroMQ belongs to one thread; others wake that one by this pair
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def process(self, node: int, rank: int, program: str) -> NodeProcess:
        """A process for a rank on a machine."""
        found = NodeProcess(self, node, rank, program)
        with self._lock:
            self._processes[rank] = found
        return found

    def send(self, process: NodeProcess, message: FromCore) -> None:
        """Have a message sent to the machine of a process, once it is there. Any thread."""
        with self._lock:
            self._waiting.append((process, message))
        self._wake.send(b"\0")

    def close(self) -> None:
        """Tell the machines that this life of the core is over, and close the socket."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.send(b"\0")
        self._thread.join()
        self._wake.close()
        self._woken.close()
        self._context.destroy(_FAREWELL_MS)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._is_closed:
            if self._woken.fileno() in dict(poller.poll(int(BEAT_S * 1000))):
                self._woken.recv(4096)
            while has_input(self._socket):
                self._take(*self._socket.recv_multipart(zmq.NOBLOCK)[:2])
            self._send_waiting()
            self._judge()
        self._send_waiting()
        for node in self._lives:
            # they end quietly after `FAREWELL_S`, unless the next life of the core comes
            self._post(self._identity(node), CoreBeat(self._life, is_over=True))

    def _take(self, identity: bytes, data: bytes = b"") -> None:
        try:
            message = self._decoder.decode(data)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("Invalid message from another machine: %s", error)
            return
        if isinstance(message, RankEnded):
            process = self._processes.get(message.rank)
            # words of a machine's earlier life are about ranks that count as lost already
            if process is not None and identity == self._identity(process.node):
                process.finish(Ending(message.code, message.words, message.last_words))
            return
        refusal = self._refusal(message)
        if not refusal and self._is_rival(message):
            since = self._rivals.setdefault(message.life, time.monotonic())
            if time.monotonic() - since < 2 * RIVAL_S:
                return  # its predecessor may have ended just now
            refusal = f"machine {message.node} is there already: each has a number of its own"
        elif not refusal:
            self._note(message)
        self._post(identity, CoreBeat(self._life, refusal))

    def _is_rival(self, beat: NodeBeat) -> bool:
        """Whether another machine with this number has given a sign just now."""
        is_other = self._lives.get(beat.node, beat.life) != beat.life
        return is_other and time.monotonic() - self._signs[beat.node] < RIVAL_S

    def _refusal(self, beat: NodeBeat) -> str:
        if beat.protocol_version != PROTOCOL_VERSION:
            return "it is of another release"
        if beat.num_nodes != self._num_nodes or not 0 < beat.node < self._num_nodes:
            return f"machines 1 to {self._num_nodes - 1} of {self._num_nodes} are expected"
        return ""

    def _note(self, beat: NodeBeat) -> None:
        """A machine is there, for the first time or again."""
        if self._lives.get(beat.node, beat.life) != beat.life:
            self._lose(beat.node, "was started again")
        self._lives[beat.node] = beat.life
        self._signs[beat.node] = time.monotonic()

    def _judge(self) -> None:
        now = time.monotonic()
        # a copy, since losing a machine removes its entry
        for node, seen in list(self._signs.items()):
            if now - seen > SILENT_S:
                self._lose(node, f"gave no sign of life for {now - seen:.1f} s")

    def _lose(self, node: int, why: str) -> None:
        del self._lives[node], self._signs[node]
        for process in list(self._processes.values()):
            if process.node == node:
                text = f"is lost, because machine {node} {why}"
                process.finish(Ending(1, text, None))

    def _send_waiting(self) -> None:
        with self._lock:
            # sent outside of the lock: those who hand over messages need not wait for the network
            waiting, self._waiting = self._waiting, []
        for process, message in waiting:
            if process.node in self._lives:
                self._post(self._identity(process.node), message)
            # a machine that is not there has no rank to end
            elif isinstance(message, StartRank):
                with self._lock:
                    self._waiting.append((process, message))

    def _identity(self, node: int) -> bytes:
        return node_identity(node, self._lives.get(node, ""))

    def _post(self, identity: bytes, message: FromCore) -> None:
        self._socket.send_multipart([identity, to_msgpack(message)])


class NodeRanks(NetworkRanks):
    """Equal numbers of ranks on each machine, the first ones here. The others know themselves on
    which CPUs the threads of theirs are.
    """

    def __init__(
        self, nodes: OtherMachines, program: str, plan: Any, mesh: Mesh, address: str
    ) -> None:
        _, num_nodes = plan.parallel.node_place
        each = mesh.world_size // num_nodes
        self._nodes = nodes

        def start_process(rank: int) -> OwnedProcess:
            if rank < each:
                return ChildProcess(program)
            return nodes.process(rank // each, rank, program)

        here = plan.parallel.thread_cpus
        cpus = (*here, *("" for _ in range(mesh.world_size - len(here))))
        super().__init__(start_process, plan, mesh, cpus, address)

    def close(self) -> None:
        super().close()
        self._nodes.close()


def open_ranks(
    config: WorkerConfig,
    *,
    platform: Platform | None = None,
    exchange: ExpertExchange | None = None,
) -> MultiprocExecutor:
    """Start a process for each rank that the plan has, here or on all of its machines."""
    parallel = config.parallel
    if not parallel.spans_machines:
        return open_multiproc(config, platform=platform, exchange=exchange)
    mesh = parallel.mesh
    keys = cluster_keys(read_environment().cluster_secret)
    address = address_here("master_addr", parallel.master_addr)
    nodes = OtherMachines(address, parallel.master_port, keys, parallel.node_place[1])
    try:
        ranks = NodeRanks(nodes, config.program, config.plan, mesh, address)
    except BaseException:
        nodes.close()
        raise
    kind = worker_class(parallel)
    return MultiprocExecutor(ranks, kind, has_drafts=config.num_drafts > 0)
