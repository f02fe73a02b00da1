"""K/V from another engine: what was computed there for a request is pulled when the same request
comes here.

The engine that computes a prompt keeps its full blocks under a lease, and says in the output's
`kv_transfer_params` where they are. The one that gets these params with the prompt pulls the blocks
whose names its own prompt has. Whatever does not come is computed (or ends the request, by
`kv_load_failure_policy`).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from quire.distributed.kv_connector.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
    WholeBlockCopies,
)
from quire.distributed.kv_connector.views import (
    ConnectorRequest,
    KVCacheBlocks,
    KVCacheConfig,
    RequestStatus,
    StepView,
)
from quire.distributed.peers.allowed import AllowedPeers
from quire.distributed.peers.client import PeerClient
from quire.distributed.peers.keys import peer_keys, shared_secret
from quire.distributed.peers.params import (
    SIGNATURE,
    Remote,
    flag,
    has_sizes,
    lease_of_tier,
    remote_of_tier,
    remote_of_two_legs,
)
from quire.distributed.peers.server import LeaseLimits, PeerServer
from quire.errors import InvalidParameter, NotBuiltYet
from quire.step.transfers import BlockKey

_WHERE = "kv_transfer_config['kv_connector_extra_config']"
_LEASE_S, _PATIENCE_S, _LEAST_TOKENS = 30.0, 5.0, 64
_MOST_LEASES, _LONGEST_S, _POOL_SHARE = 1024, 480.0, 0.5
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "backends": ((["UCX"], ["TCP"]), "Blocks travel over TCP."),
    "num_threads": ((4,), "Leave it out."),
    "bidirectional_kv_xfer": ((False,), "Both engines may serve blocks as it is."),
    "decoder_kv_blocks_ttl": ((480,), "Leave it out."),
    "push_registration_timeout": ((480,), "Nothing is pushed: leave it out."),
    "enforce_handshake_compat": ((True,), "K/V of another root is never an answer."),
    "engine_ttl": ((3600,), "Leave it out."),
}


class _Settings:
    """The fields of `kv_connector_extra_config`, checked."""

    def __init__(self, extra: Mapping[str, Any], port: int) -> None:
        left = dict(extra)
        for name, (values, hint) in _NEUTRAL.items():
            if name in left and (value := left.pop(name)) not in values:
                raise NotBuiltYet(f"{_WHERE}[{name!r}]", value, hint)
        self.host = left.pop("host", "127.0.0.1")
        self.port = left.pop("port", port)
        self.lease_s = left.pop("kv_lease_duration", _LEASE_S)
        self.patience_s = left.pop("kv_load_timeout", _PATIENCE_S)
        self.least_tokens = left.pop("kv_recompute_threshold", _LEAST_TOKENS)
        self.peers = left.pop("peers", [])
        self.most_leases = left.pop("kv_lease_count", _MOST_LEASES)
        self.longest_s = left.pop("kv_lease_limit", _LONGEST_S)
        self.pool_share = left.pop("kv_lease_pool_share", _POOL_SHARE)
        for name, value in left.items():
            raise InvalidParameter(f"{_WHERE}[{name!r}]", value, "there is no such field")
        if not isinstance(self.host, str) or self.host in ("", "*", "0.0.0.0", "::"):
            allowed = "an address of this machine at which other engines find it"
            raise InvalidParameter(f"{_WHERE}['host']", self.host, allowed)
        if type(self.port) is not int or not 0 <= self.port < 65536:
            raise InvalidParameter(f"{_WHERE}['port']", self.port, "a port, or 0 for a free one")
        for name, seconds in (
            ("kv_lease_duration", self.lease_s),
            ("kv_load_timeout", self.patience_s),
            ("kv_lease_limit", self.longest_s),
        ):
            if not isinstance(seconds, int | float) or not 0 < seconds <= 86400:
                raise InvalidParameter(f"{_WHERE}[{name!r}]", seconds, "seconds, more than 0")
        if type(self.least_tokens) is not int or self.least_tokens < 0:
            where = f"{_WHERE}['kv_recompute_threshold']"
            raise InvalidParameter(where, self.least_tokens, "a number of tokens")
        if type(self.most_leases) is not int or self.most_leases < 1:
            where = f"{_WHERE}['kv_lease_count']"
            raise InvalidParameter(where, self.most_leases, "a number of at least 1")
        if not isinstance(self.pool_share, int | float) or not 0 < self.pool_share <= 1:
            where = f"{_WHERE}['kv_lease_pool_share']"
            raise InvalidParameter(where, self.pool_share, "a share of the pool, from 0 to 1")


class WorkerSide(Protocol):
    """The worker's half, or those of all ranks, as far as the scheduler's half reaches it."""

    @property
    def port(self) -> int:
        """The port at which the first rank serves blocks."""
        ...

    def hold(self, remote: Remote) -> None:
        """Keep a lease alive until `release`."""
        ...

    def release(self, remote: Remote) -> None:
        """A lease is not wanted any more."""
        ...

    def offer(self, lease: str, request_id: str, blocks: Mapping[BlockKey, int]) -> bool:
        """Keep blocks for whoever names this lease; see `PeerServer.offer`."""
        ...


class PeerHandshake(KVConnectorHandshakeMetadata):
    """The side that the scheduler's half reaches."""

    def __init__(self, side: WorkerSide, engine_id: str) -> None:
        self.side, self.engine_id = side, engine_id


class Pulls(KVConnectorMetadata):
    """The loads that a step begins: request, where from, blocks."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, Remote, Sequence[tuple[int, BlockKey]]]] = []


class PeerConnector(KVConnectorBase_V1, SupportsHMA):
    """The base class of connectors that pull; they differ in the params of requests."""

    reads_steps = False
    default_port = 5600

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config
        rank = config.rank
        self._settings = _Settings(config.kv_connector_extra_config, self.default_port)
        if self._settings.port:
            self._settings.port += rank * config.num_workers + config.worker
        elif config.num_workers > 1:
            allowed = "a port with several ranks: each takes the next one"
            raise InvalidParameter(f"{_WHERE}['port']", 0, allowed)
        self._worker, self._sizes = config.worker, (config.tp_size, config.pp_size)
        self._is_producer, self._is_consumer = config.is_kv_producer, config.is_kv_consumer
        self.engine_id = config.engine_id or secrets.token_hex(16)
        self.engine_id += f"_dp{rank}" if rank else ""
        self._keys = peer_keys(shared_secret(self._settings.host))
        self.allowed = AllowedPeers(f"{_WHERE}['peers']", self._settings.peers, self._keys)
        self._limits = LeaseLimits(
            int(self._settings.pool_share * kv_cache_config.num_blocks),
            self._settings.most_leases,
            self._settings.longest_s,
        )
        sizes = [group.block_size for group in kv_cache_config.kv_cache_groups]
        self._block_size = max(sizes)
        self._root: Callable[[], str | None] = lambda: None
        # the scheduler's half
        self._side: WorkerSide | None = None
        self._remotes: dict[str, tuple[Remote, int]] = {}
        """Requests that may pull -> from where, and how many tokens there are."""
        self._used: set[str] = set()
        self._pulls = Pulls()
        # the worker's half
        self.server: PeerServer | None = None
        self.client: PeerClient | None = None
        self._copies: WholeBlockCopies | None = None
        self._copying = threading.Lock()
        self._bad: set[int] = set()

    # What the classes differ in

    def remote_of(self, params: Mapping[str, Any]) -> tuple[Remote, int] | None:
        """Place of a request's K/V, and the number of its tokens; None: nowhere. Raises
        InvalidParameter.
        """
        raise NotImplementedError

    def lease_of(self, params: Mapping[str, Any]) -> str | None:
        """The name under which K/V of a request is kept when it ends; None: it is not."""
        raise NotImplementedError

    def params_of(
        self, request: ConnectorRequest, lease: str, tables: Any
    ) -> dict[str, Any] | None:
        """The params of the output of a request whose K/V is kept."""
        raise NotImplementedError

    # The worker's half

    def bind_root(self, root: Callable[[], str | None]) -> None:
        self._root = root

    def bind_block_copies(self, copies: WholeBlockCopies, content_bytes: Sequence[int]) -> None:
        settings, self._copies = self._settings, copies
        if self._is_producer:
            try:
                self.server = PeerServer(
                    settings.host,
                    settings.port,
                    self._keys,
                    engine_id=self.engine_id,
                    sizes=content_bytes,
                    root=self._root,
                    read=self._read,
                    lease_s=settings.lease_s,
                    limits=self._limits,
                )
            except OSError as error:
                allowed = f"it cannot be opened: {error.strerror}"
                raise InvalidParameter(f"{_WHERE}['port']", settings.port, allowed) from error
        if self._is_consumer:
            self.client = PeerClient(
                self._keys,
                sizes=content_bytes,
                root=self._root,
                write=self._write,
                lease_s=settings.lease_s,
                patience_s=settings.patience_s,
            )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return PeerHandshake(self, self.engine_id)

    @property
    def port(self) -> int:
        assert self.server is not None, "it sends"
        return self.server.port

    def hold(self, remote: Remote) -> None:
        assert self.client is not None, "it loads"
        self.client.hold(self._of_same_rank(remote))

    def release(self, remote: Remote) -> None:
        assert self.client is not None, "it loads"
        self.client.release(self._of_same_rank(remote))

    def offer(self, lease: str, request_id: str, blocks: Mapping[BlockKey, int]) -> bool:
        assert self.server is not None, "it sends"
        return self.server.offer(lease, request_id, blocks)

    def withdraw(self, lease: str) -> None:
        """End a lease: another rank has no room for it."""
        assert self.server is not None, "it sends"
        self.server.withdraw(lease)

    def pull(self, request_id: str, remote: Remote, blocks: Sequence[tuple[int, BlockKey]]) -> None:
        """Fill blocks beside steps; `get_finished` tells of the end."""
        assert self.client is not None and self._copies is not None, "only who loads is asked"
        self.client.pull(request_id, self._of_same_rank(remote), blocks, self._copies.mark())

    def _of_same_rank(self, remote: Remote) -> Remote:
        """The place of what the rank of this number keeps there."""
        return remote._replace(port=remote.port + self._worker)

    def _read(self, group: int, block: int, slot: Tensor) -> None:
        assert self._copies is not None, "it was bound"
        with self._copying:
            self._copies.read(group, block, slot)

    def _write(self, group: int, block: int, slot: Tensor) -> None:
        assert self._copies is not None, "it was bound"
        with self._copying:
            self._copies.write(group, block, slot)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pulls = self._get_connector_metadata()
        assert isinstance(pulls, Pulls), "its own metadata"
        for load in pulls.loads:
            self.pull(*load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads run beside steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are read where they are."""

    def wait_for_save(self) -> None:
        """Blocks are leased while they are read."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done = [] if self.client is None else self.client.take_done()
        self._bad.update(*(missing for _, missing in done))
        sent = [] if self.server is None else self.server.take_ended()
        return set(sent), {request_id for request_id, _ in done}

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def get_kv_connector_stats(self) -> dict[str, int]:
        return self.counts

    @property
    def counts(self) -> dict[str, int]:
        """Sums since the start, by the names of vLLM's metrics."""
        client, server = self.client, self.server
        return {
            "nixl_bytes_transferred": 0 if client is None else client.num_loaded_bytes,
            "nixl_num_descriptors": 0 if client is None else client.num_loaded_blocks,
            "nixl_num_failed_transfers": 0 if client is None else client.num_failed,
            "nixl_num_kv_expired_reqs": 0 if server is None else server.num_expired,
        }

    def wait_for_news(self, timeout_s: float) -> None:
        waits = self.server if self.client is None else self.client
        if waits is not None:
            waits.wait(timeout_s)

    def settle(self) -> bool:
        if self.client is not None:
            self.client.end_all()
        if self.server is not None:
            self.server.end_all()
        return True

    def shutdown(self) -> None:
        for each in (self.client, self.server):
            if each is not None:
                each.close()
        self.client = self.server = None

    # The scheduler's half

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        (only,) = metadata.values()
        assert isinstance(only, PeerHandshake), "the same class"
        self._side, self.engine_id = only.side, only.engine_id

    def on_new_request(self, request: ConnectorRequest) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        self.lease_of(params)  # raises for what cannot be one
        found = self.remote_of(params)
        if found is None or not self._is_consumer or not has_sizes(params, *self._sizes):
            return
        self.allowed.check(*found, params.get(SIGNATURE))
        self._remotes[request.request_id] = found
        assert self._side is not None, "it was joined"
        self._side.hold(found[0])

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self._remotes.get(request.request_id)
        if found is None or request.request_id in self._used:
            return 0, False
        # the last token is computed here: the first one that is drawn follows from its logits
        most = min(found[1], request.num_tokens - 1)
        count = most // self._block_size * self._block_size - num_computed_tokens
        if count <= 0 or count < self._settings.least_tokens:
            return 0, False
        return count, True

    def update_state_after_alloc(
        self, request: ConnectorRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        if num_external_tokens:
            self._used.add(request_id)
            remote, _ = self._remotes[request_id]
            self._pulls.loads.append((request_id, remote, blocks.to_load))
        else:
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        """Let go what the request does not need any more."""
        self._used.discard(request_id)
        found = self._remotes.pop(request_id, None)
        if found is not None:
            assert self._side is not None, "it was joined"
            self._side.release(found[0])

    def build_connector_meta(self, scheduler_output: StepView) -> KVConnectorMetadata:
        pulls, self._pulls = self._pulls, Pulls()
        return pulls

    def request_finished(
        self, request: ConnectorRequest, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: ConnectorRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # also of a request that fails: its peer keeps blocks for nobody else
        self._release(request.request_id)
        params = request.kv_transfer_params
        has_result = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        # of a request that was refused for its params, they cannot be read here either
        if not params or not self._is_producer or not has_result:
            return False, None
        lease = self.lease_of(params)
        if lease is None:
            return False, None
        blocks = request.keyed_blocks()
        if not blocks:
            return False, None
        assert self._side is not None, "it was joined"
        if not self._side.offer(lease, request.request_id, blocks):
            return False, None
        return True, self.params_of(request, lease, block_ids)


class NixlConnector(PeerConnector):
    """Follows the protocol of two legs: a proxy sends a prompt to the engine that computes it, and
    what that answers with the prompt to the engine that goes on.
    """

    def remote_of(self, params: Mapping[str, Any]) -> tuple[Remote, int] | None:
        return remote_of_two_legs(params)

    def lease_of(self, params: Mapping[str, Any]) -> str | None:
        return secrets.token_hex(16) if flag(params, "do_remote_decode") else None

    def params_of(
        self, request: ConnectorRequest, lease: str, tables: Any
    ) -> dict[str, Any] | None:
        assert self._side is not None, "it was joined"
        settings, count = self._settings, request.num_computed_tokens
        own = Remote(settings.host, self._side.port, self.engine_id, lease)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(table) for table in tables],
            "remote_engine_id": own.engine_id,
            "remote_request_id": lease,
            "remote_host": own.host,
            "remote_port": own.port,
            "remote_num_tokens": count,
            "remote_blocks_expiry_time": time.time() + settings.lease_s,
            SIGNATURE: self.allowed.signature(own, count),
            "transfer_mode": "pull",
            "tp_size": self._sizes[0],
            "pp_size": self._sizes[1],
            "dcp_size": 1,
        }


class PeerTier(PeerConnector):
    """A secondary tier of type p2p: a router names the request for both engines."""

    default_port = 5710

    def remote_of(self, params: Mapping[str, Any]) -> tuple[Remote, int] | None:
        return remote_of_tier(params)

    def lease_of(self, params: Mapping[str, Any]) -> str | None:
        return lease_of_tier(params)

    def params_of(
        self, request: ConnectorRequest, lease: str, tables: Any
    ) -> dict[str, Any] | None:
        return None
