"""The way of cores on other machines to a front end: HELLO, WELCOME.

A headless launcher sends the indices of its cores; the front end answers with the addresses of the
sockets, or with the reason why it refuses them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec
import zmq

from quire.config.plan import EnginePlan
from quire.encodable import to_msgpack
from quire.engine.wire.messages import PROTOCOL_VERSION, EngineZmqAddresses, Hello, Welcome
from quire.errors import EngineError
from quire.processes.cluster_keys import ClusterKeys, close_to_strangers, introduce
from quire.processes.codec import has_input

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_MINS = 5

MISSED_AFTER_S = 60.0
"""Time after which a front end has certainly noticed the death of a core."""
ASK_AGAIN_S = 0.25
BEAT_MS, SILENT_MS = 500, 8500
"""A front end that does not answer for so long is gone: its machine's silence ends the cores after
10 s in all. TCP sends again 6.2 s after it has lost a packet, so a link may be cut for 5 s.
"""

_DIGESTED = attrgetter(
    *("model.seed", "model.max_model_len", "memory.kv_dtype", "memory.block_size"),
    *("parallel.data_parallel_size", "parallel.data_parallel_mode"),
    "parallel.enable_expert_parallel",
)
"""Values that two cores need alike for equal answers, next to their weights and sampling."""


def plan_digest(plan: EnginePlan) -> str:
    """A digest of what cores of one engine must have in common."""
    values = [plan.model.weights_key(), repr(plan.sampling), *_DIGESTED(plan)]
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()


Join = Callable[[Sequence[int]], list[int] | None]


class HandshakeServer:
    """Answers HELLO at `endpoint`. Each of `missing` is admitted once, and again after it died.

    `join(engine_indices)` returns the incarnations of cores that join, or None when one of them is
    connected already. Never waits.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClusterKeys,
        addresses: EngineZmqAddresses,
        plan: EnginePlan,
        missing: Sequence[int],
    ) -> None:
        self._context = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        close_to_strangers(self.socket, keys)
        self.socket.bind(endpoint)
        self._addresses = addresses
        self._digest = plan_digest(plan)
        self._size = plan.parallel.mesh.dp
        self.missing = list(missing)
        self._hello = msgspec.msgpack.Decoder(Hello)

    def take(self, join: Join) -> None:
        while has_input(self.socket):
            identity, *rest = self.socket.recv_multipart(zmq.NOBLOCK)
            try:
                hello = self._hello.decode(rest[0] if rest else b"")
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                logger.error("Invalid HELLO message: %s", error)
                continue
            welcome = self._answer(hello, join)
            if welcome.refusal is not None:
                logger.error("Rejected cores %s: %s", hello.engine_indices, welcome.refusal)
            self.socket.send_multipart([identity, to_msgpack(welcome)])

    def close(self) -> None:
        """Close the socket; launchers that have joined notice that."""
        self._context.destroy(linger=0)

    def _answer(self, hello: Hello, join: Join) -> Welcome:
        refusal = self._refusal(hello)
        if refusal is not None:
            return Welcome(PROTOCOL_VERSION, refusal=refusal)
        incarnations = join(hello.engine_indices)
        if incarnations is None:
            refusal = "one of these cores is here already"
            return Welcome(PROTOCOL_VERSION, refusal=refusal, may_change=True)
        return Welcome(
            PROTOCOL_VERSION,
            self._addresses,
            incarnations=incarnations,
            num_cores=self._size,
        )

    def _refusal(self, hello: Hello) -> str | None:
        if hello.protocol_version != PROTOCOL_VERSION:
            return "the front end is of another release"
        if hello.plan_digest != self._digest:
            return "the cores' model or settings differ from the front end's"
        indices = hello.engine_indices
        if len(set(indices)) != len(indices) or not set(indices) <= set(self.missing):
            return f"the front end waits for cores {self.missing} only"
        return None


def say_hello(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    server_key: bytes,
    plan: EnginePlan,
    timeout_s: float,
) -> tuple[zmq.Socket[bytes], Welcome]:
    """Ask the front end to take the plan's cores; the socket stays open for as long as they serve.

    Raises TimeoutError when it does not answer (or does not know the secret), EngineError when it
    refuses.
    """
    socket = context.socket(zmq.DEALER)
    try:
        return socket, _welcome(socket, endpoint, server_key, plan, timeout_s)
    except BaseException:
        socket.close(linger=0)
        raise


def _welcome(
    socket: zmq.Socket[bytes], endpoint: str, server_key: bytes, plan: EnginePlan, timeout_s: float
) -> Welcome:
    socket.linger = 0
    socket.heartbeat_ivl, socket.heartbeat_timeout = BEAT_MS, SILENT_MS
    introduce(socket, server_key)
    socket.connect(endpoint)
    ranks = list(plan.parallel.data_parallel_ranks)
    hello = Hello(PROTOCOL_VERSION, ranks, False, True, plan_digest(plan))
    end = time.monotonic() + min(timeout_s, MISSED_AFTER_S)
    while True:
        socket.send(to_msgpack(hello))
        if not socket.poll(int(timeout_s * 1000)):
            raise TimeoutError(
                f"No front end answered at {endpoint} within {timeout_s:g} s. Is it there, and "
                "does it have the same QUIRE_CLUSTER_SECRET?"
            )
        welcome = msgspec.msgpack.decode(socket.recv(), type=Welcome)
        if welcome.refusal is None:
            return welcome
        if not welcome.may_change or time.monotonic() >= end:
            raise EngineError(f"The front end refused: {welcome.refusal}.")
        # the front end may not have noticed yet that the cores which were here before have died
        time.sleep(ASK_AGAIN_S)
