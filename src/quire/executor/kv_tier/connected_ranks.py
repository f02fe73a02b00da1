"""A connector that pulls between engines of several ranks: each rank pulls what it has of a block
from the rank of its number, and a block counts when all have it.

The scheduler's half is in the core, the workers' in the processes of ranks, which are called with
plain values.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire.distributed.kv_connector.base import KVConnectorMetadata, KVConnectorRole
from quire.distributed.kv_connector.peer_connector import PeerConnector, PeerHandshake, Pulls
from quire.distributed.kv_connector.views import KVCacheConfig, KVCacheGroup, KVConnectorOutput
from quire.distributed.peers.params import Remote
from quire.executor.abstract import BuiltExecutor, Executor
from quire.executor.kv_tier.connected_worker import ConnectedWorker, OfConnector, make_connector
from quire.step.transfers import BlockKey
from quire.tiers.kv_transfer_config import KVTransferConfig

_LOOKS_S = 0.02
"""Seconds between two questions whether leases have ended."""


class ConnectedRank:
    """A rank's half, in its process."""

    def __init__(
        self,
        connect: Callable[[Any], tuple[Any, ConnectedWorker]],
        plan: Any,
        config: KVTransferConfig,
    ) -> None:
        """`config` carries the number of the rank."""
        self._connect, self._plan, self._config = connect, plan, config
        self._worker: ConnectedWorker | None = None

    def open(self, engine_id: str) -> int:
        """Begin to serve, and return the port; 0: it does not."""
        config = msgspec.structs.replace(self._config, engine_id=engine_id)
        _, self._worker = self._connect(OfConnector(self._plan, config))
        return 0 if self._half.server is None else self._half.port

    @property
    def _half(self) -> PeerConnector:
        assert self._worker is not None, "it is open"
        half = self._worker.connector
        assert isinstance(half, PeerConnector), "a class of those that pull"
        return half

    def begin(self, commands: Sequence[Sequence[Any]]) -> None:
        """Do what the core's half has asked for, in its order."""
        for name, remote, *load in commands:
            where = Remote(*remote)
            if name == "hold":
                self._half.hold(where)
            elif name == "release":
                self._half.release(where)
            else:
                request_id, blocks = load
                self._half.pull(request_id, where, [(block, (k, g)) for block, k, g in blocks])

    def take(self) -> tuple[list[str], list[str], list[int], dict[str, int]]:
        """The requests whose sends, and whose loads, have ended here; blocks that could not be
        filled; counts.
        """
        sent, loaded = self._half.get_finished(set())
        bad = self._half.get_block_ids_with_load_errors()
        return sorted(sent or ()), sorted(loaded or ()), sorted(bad), self._half.counts

    def offer(self, lease: str, request_id: str, blocks: Sequence[tuple[bytes, int, int]]) -> bool:
        return self._half.offer(lease, request_id, {(k, g): block for k, g, block in blocks})

    def withdraw(self, lease: str) -> None:
        """End a lease that another rank has no room for."""
        self._half.withdraw(lease)

    def settle(self) -> None:
        """End loads and sends."""
        self._half.settle()

    def wait(self, timeout_s: float) -> None:
        """Wait for something to take, at most for `timeout_s`."""
        self._half.wait_for_news(timeout_s)

    def forget_root(self) -> None:
        """The weights are not those of the files any more."""
        assert self._worker is not None, "it is open"
        self._worker.forget_root()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class ConnectedRanks:
    """The halves of all ranks, for the core: as one worker, and as the side that the scheduler's
    half reaches.

    Invariant: a load or a send has ended when it has on every rank.
    """

    def __init__(self, executor: Executor, engine_id: str) -> None:
        self._executor = executor
        ports = self._call("open", engine_id)
        self.port: int = ports[0]
        self._num_ranks = len(ports)
        self._commands: list[list[Any]] = []
        self._sends: dict[str, int] = {}
        self._loads: dict[str, int] = {}
        """Requests -> on how many ranks their sends, or loads, have ended."""
        self._looks_at = 0.0

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._executor.collective_rpc("call_connector", (method, list(args)), {})

    # The side that the scheduler's half reaches

    def hold(self, remote: Remote) -> None:
        self._commands.append(["hold", list(remote)])

    def release(self, remote: Remote) -> None:
        self._commands.append(["release", list(remote)])

    def offer(self, lease: str, request_id: str, blocks: Mapping[BlockKey, int]) -> bool:
        plain = [[key, group, block] for (key, group), block in blocks.items()]
        if all(self._call("offer", lease, request_id, plain)):
            self._sends[request_id] = 0
            return True
        # K/V of some ranks alone is of no use
        self._call("withdraw", lease)
        return False

    # The worker of the connection

    def begin(self, metadata: KVConnectorMetadata) -> set[int]:
        """See `ConnectedWorker`: nothing is loaded in a step itself."""
        assert isinstance(metadata, Pulls), "of a class of those that pull"
        for request_id, remote, blocks in metadata.loads:
            plain = [[block, key, group] for block, (key, group) in blocks]
            self._commands.append(["pull", list(remote), request_id, plain])
            self._loads[request_id] = 0
        if self._commands:
            commands, self._commands = self._commands, []
            self._call("begin", commands)
        return set()

    def end(self, finished: set[str], *, has_computed: bool) -> KVConnectorOutput:
        """Report what has ended on all ranks."""
        now = time.monotonic()
        if not self._loads and (not self._sends or now < self._looks_at):
            return KVConnectorOutput()
        # a question goes to all ranks: the end of a lease may be noticed late, unlike that of a
        # load
        self._looks_at = now + _LOOKS_S
        sent, loaded, bad = set[str](), set[str](), set[int]()
        sums = Counter[str]()
        for sent_here, loaded_here, bad_here, counts in self._call("take"):
            sent.update(name for name in sent_here if self._has_ended(self._sends, name))
            loaded.update(name for name in loaded_here if self._has_ended(self._loads, name))
            bad.update(bad_here)
            sums.update(counts)
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving=loaded,
            invalid_block_ids=bad,
            kv_connector_stats=sums,
        )

    def _has_ended(self, counts: dict[str, int], request_id: str) -> bool:
        """Count a rank on which something of a request has ended; whether it was the last."""
        if request_id not in counts:
            return False  # a lease that was withdrawn
        counts[request_id] += 1
        if counts[request_id] < self._num_ranks:
            return False
        del counts[request_id]
        return True

    def forget_root(self) -> None:
        """The weights are not those of the files any more."""
        self._call("forget_root")

    def settle(self) -> bool:
        """End loads and sends; the next `end` tells of them."""
        self._call("settle")
        self._looks_at = 0.0
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for something to report, at most for `timeout_s`."""
        self._call("wait", timeout_s)

    def close(self) -> None:
        """Do nothing: workers close their halves."""


def connect_ranks(
    plan: Any, config: KVTransferConfig, executor: BuiltExecutor, block_size: int
) -> tuple[PeerConnector, ConnectedRanks]:
    """Make the halves of the connector of a plan: the scheduler's, and those of the ranks."""
    own = msgspec.structs.replace(config, engine_id=config.engine_id or secrets.token_hex(16))
    specs = [spec for spec in executor.facts.kv_groups if spec.kind != "none"]
    groups = tuple(KVCacheGroup((), spec.block_size or block_size) for spec in specs)
    blocks = KVCacheConfig(executor.facts.num_blocks, groups)
    first = make_connector(OfConnector(plan, own), KVConnectorRole.SCHEDULER, blocks)
    assert isinstance(first, PeerConnector), "options were checked"
    ranks = ConnectedRanks(executor, own.engine_id)
    first.set_xfer_handshake_metadata({0: PeerHandshake(ranks, first.engine_id)})
    return first, ranks
