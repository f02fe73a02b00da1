"""Contents of blocks that a connector brings from elsewhere, or sends there.

A connector is asked about every request that is about to get a row. What it loads beside steps the
request waits for, with blocks; what it loads in the step itself is computed tokens of that step,
whose blocks become findable when the step has succeeded, as those of others do. Blocks that are
read after the end of their request are under a lease until the connector is done with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from quire.scheduling.block_pool import Lease
from quire.scheduling.block_tables import BlockTables
from quire.scheduling.request import Request, Stop
from quire.step.plan import NULL_BLOCK
from quire.step.transfers import BlockKey


class Connection(Protocol):
    """The scheduler's side of a connector."""

    def offer(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """Number of tokens after the `num_local` first ones that can be loaded (None: ask again in
        the next step), and whether they are loaded beside steps. Without side effects.
        """
        ...

    def begin(self, request: Request, blocks: Sequence[tuple[int, BlockKey]], count: int) -> None:
        """Load `count` tokens into `blocks` beside steps; `end_loads` tells of the end."""
        ...

    def entered(self, request: Request, count: int) -> None:
        """The request has a row and its blocks; `count` tokens of it are loaded in this step."""
        ...

    def finish(self, request: Request, stop: Stop | None) -> bool:
        """The request ends, None: without a result; it still has its blocks. Returns whether they
        are read from now on.
        """
        ...

    def take_bad_blocks(self) -> Collection[int]:
        """The blocks that the oldest step in flight was to load and could not."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until a load has ended, at most for `timeout_s`."""
        ...


class ConnectedLoad:
    """The load beside steps that a waiting request waits for: one of its prerequisites."""

    def __init__(self, request: Request, num_local: int, connection: Connection) -> None:
        self.request: Request | None = request
        """The request that waits; None once it has given the load up."""
        self.num_local_tokens = num_local
        """The leading tokens that were cached before."""
        self.num_tokens = request.num_hit_tokens
        """The leading tokens that are cached once it has ended."""
        self.is_ready = self.is_loaded = False
        self._connection = connection

    def wait(self, timeout_s: float) -> None:
        """See `Prerequisite.wait`."""
        self._connection.wait(timeout_s)


class ConnectedRequests:
    """The loads and sends of one scheduler's requests, by their handles."""

    def __init__(self, connection: Connection, memory: BlockTables) -> None:
        self.connection = connection
        self._memory = memory
        self._loads: dict[int, tuple[ConnectedLoad, Lease]] = {}
        self._sends: dict[int, Lease] = {}

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    @property
    def loads(self) -> list[int]:
        """The requests with loads that have not ended."""
        return list(self._loads)

    @property
    def sends(self) -> Collection[int]:
        """The requests that have ended, and whose blocks are still read."""
        return self._sends.keys()

    @property
    def num_leased(self) -> int:
        leases = [*self._sends.values(), *(lease for _, lease in self._loads.values())]
        return sum(len(lease.blocks) for lease in leases)

    # Admission

    def admits(self, request: Request, outstanding: int) -> bool:
        """Extend the hit of a waiting request by what can be loaded. False if it has to wait for
        that, or for an answer.
        """
        if request.external is not None or request.is_spoiled or self._is_computed(request):
            return True
        local = request.num_hit_tokens
        count, is_beside = self.connection.offer(request, local)
        if count is None:
            return False
        # the last known token is always computed, since its logits are needed
        count = min(count, request.num_tokens - 1 - local)
        if count <= 0:
            return True
        if not is_beside:
            request.num_hit_tokens, request.num_unloaded_tokens = local + count, count
            return True
        size = self._memory.key_size
        # only whole blocks are loaded beside steps: they have keys under which a preempted request
        # finds them
        offered = set(request.keys[: (local + count) // size])
        found = self._memory.begin_load(request, lambda key: key[0] in offered, outstanding)
        if not found:
            return True
        load = ConnectedLoad(request, local, self.connection)
        lease = Lease(self._memory.pool, [block for block, _ in found])
        request.external = load
        self._loads[request.handle] = load, lease
        request.prerequisites = [*request.prerequisites, load]
        self.connection.begin(request, found, request.num_hit_tokens - local)
        return False

    @staticmethod
    def _is_computed(request: Request) -> bool:
        """Whether nothing is loaded for it: rows of encoders stand in it, or it is not to read."""
        return bool(request.media) or request.params.skip_reading_prefix_cache is True

    def entered(self, request: Request) -> None:
        """The request has got a row and its first blocks."""
        self.connection.entered(request, request.num_unloaded_tokens)

    @staticmethod
    def num_local(request: Request, hit: int) -> int:
        """The tokens of a hit that were cached without a load."""
        load = request.external
        if isinstance(load, ConnectedLoad) and load.is_loaded:
            return min(load.num_local_tokens, hit)
        return hit - request.num_unloaded_tokens

    # Ends

    def give_up(self, request: Request) -> None:
        """The request, which waits or has ended, does not want what is loaded for it any more."""
        load = request.external
        if isinstance(load, ConnectedLoad) and not load.is_ready:
            load.request, load.is_ready = None, True
            self._memory.release(request)

    def finish(self, request: Request, stop: Stop | None) -> None:
        """The request ends. Its blocks stay while the connector reads them."""
        if self.connection.finish(request, stop):
            tables = request.block_ids
            blocks = [block for table in tables for block in table if block != NULL_BLOCK]
            self._sends[request.handle] = Lease(self._memory.pool, blocks)

    def end_loads(self, ends: Iterable[tuple[int, Collection[int]]]) -> None:
        """Loads, by their requests, have ended; those with blocks that could not be filled have
        failed.
        """
        for handle, bad in ends:
            load, lease = self._loads.pop(handle)
            if (request := load.request) is not None:
                # one missing block makes what follows it useless, and blocks before it are not
                # worth a second rule
                if not bad:
                    self._memory.publish(request, load.num_tokens)
                self._memory.release(request)
                load.request, load.is_ready, load.is_loaded = None, True, not bad
            lease.end()

    def abandon_loads(self) -> None:
        """Have all requests that wait for a load computed. Their blocks stay under a lease, since
        nobody knows whether they are still written, until the ends of the loads are told.
        """
        for load, _ in self._loads.values():
            if (request := load.request) is not None:
                self._memory.release(request)
                load.request, load.is_ready = None, True

    def is_loading(self, handle: int) -> bool:
        return handle in self._loads

    def blocks_of(self, handle: int) -> Sequence[int]:
        return self._loads[handle][1].blocks

    def is_leased_to_load(self, block: int) -> bool:
        """Whether a load beside steps fills this block."""
        return any(block in lease.blocks for _, lease in self._loads.values())

    def end_sends(self, handles: Iterable[int]) -> None:
        """The blocks of these requests are not read any more."""
        for handle in handles:
            self._sends.pop(handle).end()
