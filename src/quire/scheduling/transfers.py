"""Contents of blocks that come from a tier outside of the pool, or go there.

A waiting request whose next blocks are in the tier gets blocks for them and waits on, as it does
for a grammar; once they are loaded they are cached blocks like others. Blocks that become findable
are stored where the tier wants them. Whoever copies is not waited for: a transfer's blocks are
under a lease until it has ended, even if the request is aborted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.scheduling.block_pool import BlockPool, Lease
from quire.scheduling.block_tables import BlockTables
from quire.scheduling.request import Request
from quire.step.plan import BlockTransfer
from quire.step.transfers import BlockKey


class Tier(Protocol):
    """An index of the contents that are kept outside of the pool. The copies themselves are made by
    whoever executes plans.
    """

    def has(self, key: BlockKey) -> bool:
        """Whether this content can be loaded. A load that fails all the same costs only time."""
        ...

    def wants(self, key: BlockKey) -> bool:
        """Whether this content, which has become findable, is to be stored."""
        ...

    def stored(self, key: BlockKey) -> None:
        """A store has ended well: from now on the content can be loaded."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until a transfer has ended, at most for `timeout_s`."""
        ...


class TierLoad:
    """The load that a waiting request waits for: one of its prerequisites."""

    def __init__(
        self, request: Request, num_local_tokens: int, num_tokens: int, tier: Tier
    ) -> None:
        """num_tokens: the leading tokens of the request that are cached once it has ended."""
        self.request: Request | None = request
        """The request that waits; None once it has given the load up."""
        self.num_tokens = num_tokens
        self.num_local_tokens = num_local_tokens
        """The leading tokens that were cached before."""
        self.is_ready = self.is_loaded = False
        self._tier = tier

    def wait(self, timeout_s: float) -> None:
        """See `Prerequisite.wait`."""
        self._tier.wait(timeout_s)


class Transfers:
    """The loads and stores of one scheduler."""

    def __init__(self, tier: Tier, memory: BlockTables) -> None:
        self._tier = tier
        self._memory = memory
        self._pool: BlockPool = memory.pool
        self._next = 0
        self._leases: dict[int, Lease] = {}
        """Transfers that have not ended -> their blocks."""
        self._loads: dict[int, TierLoad] = {}
        self._stores: dict[int, BlockKey] = {}
        self._to_load: list[BlockTransfer] = []
        self._to_store: dict[BlockKey, int] = {}
        self._pool.listeners.append(self)

    @property
    def num_leased(self) -> int:
        return sum(len(lease.blocks) for lease in self._leases.values())

    @property
    def num_under_way(self) -> int:
        return len(self._leases)

    # Loads

    def begin_load(self, request: Request, outstanding: int) -> bool:
        """Give a waiting request blocks for what the tier has after its hit, and have them loaded.
        False if there is nothing to load, or no room beside the `outstanding` blocks that running
        requests still need.
        """
        if request.load is not None:
            # trying again would let a tier that fails or thrashes hold the request back for ever
            return False  # it has had one, which failed, or whose blocks are gone again
        num_local = request.num_hit_tokens
        found = self._memory.begin_load(request, self._tier.has, outstanding)
        if not found:
            return False
        number = self._lease([block for block, _ in found])
        self._to_load += [BlockTransfer(number, block, *key) for block, key in found]
        load = TierLoad(request, num_local, request.num_hit_tokens, self._tier)
        request.load = self._loads[number] = load
        request.prerequisites = [*request.prerequisites, load]
        return True

    def give_up(self, request: Request) -> None:
        """The request, which waits or has ended, does not want what is loaded for it any more."""
        load = request.load
        if isinstance(load, TierLoad) and not load.is_ready:
            load.request, load.is_ready = None, True
            # the lease keeps the blocks until the copy has ended, since nobody can call it back
            self._memory.release(request)
        request.load = None

    def loads_for(self, number: int) -> int | None:
        """The request that waits for this load; None: none does, or it is a store."""
        load = self._loads.get(number)
        return None if load is None or load.request is None else load.request.handle

    # Stores

    def published(self, block: int, key: BlockKey, request: Request, num_tokens: int) -> None:
        """A block has become findable: see `BlockListener`."""
        if self._tier.wants(key):
            self._to_store[key] = block

    def evicted(self, block: int, key: BlockKey) -> None:
        """A block is not findable any more: what was to be stored of it is lost."""
        self._to_store.pop(key, None)

    def cleared(self) -> None:
        """No block is findable any more: nothing is stored of them."""
        self._to_store.clear()

    def released(self, block: int) -> None:
        """A block without references is still findable."""

    @staticmethod
    def num_local(request: Request) -> int:
        """The tokens of a request's hit that were cached without a load for it."""
        load = request.load
        if isinstance(load, TierLoad) and load.is_loaded:
            return min(load.num_local_tokens, request.num_hit_tokens)
        return request.num_hit_tokens

    # Steps

    @property
    def has_changes(self) -> bool:
        """Whether the next plan has transfers to begin."""
        return bool(self._to_load or self._to_store)

    def take_changes(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """The loads and stores that the current plan begins."""
        stores = []
        for key, block in self._to_store.items():
            number = self._lease([block])
            self._stores[number] = key
            stores.append(BlockTransfer(number, block, *key))
        loads, self._to_load, self._to_store = self._to_load, [], {}
        return loads, stores

    def end(self, done: Sequence[int], failed: Sequence[int]) -> None:
        """Transfers have ended: the blocks that were loaded are cached from now on."""
        ends = [*((number, True) for number in done), *((number, False) for number in failed)]
        for number, is_done in ends:
            load, key = self._loads.pop(number, None), self._stores.pop(number, None)
            if load is not None and (request := load.request) is not None:
                self._memory.end_load(request, load.num_tokens, is_done=is_done)
                load.request, load.is_ready, load.is_loaded = None, True, is_done
            if key is not None and is_done:
                self._tier.stored(key)
            # last: until here nobody else may get these blocks
            self._leases.pop(number).end()

    def _lease(self, blocks: Sequence[int]) -> int:
        self._next += 1
        self._leases[self._next] = Lease(self._pool, blocks)
        return self._next
