"""Recurrent state in blocks of the pool: rings of blocks for requests, and snapshots for prefix
hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from quire.scheduling.block_groups import StateGroup
from quire.scheduling.block_pool import BlockPool
from quire.scheduling.request import Request
from quire.step.transfers import BlockKey


class StateBlocks:
    """The blocks of the KV groups with recurrent state, by group number.

    A request starts with a zeroed state, or with a copy of a snapshot at a block border. New
    snapshots are made every `interval` tokens of its prompt, and at its last border: a chunk ends
    there, the plan of the next chunk copies the state, and the copy is findable once that step has
    succeeded. Snapshots get blocks that nothing else needs, all together at most `most` of them:
    beyond that the least recently used ones make room.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Mapping[int, StateGroup],
        *,
        key_size: int,
        border: int,
        interval: int,
        most: int | None,
    ) -> None:
        """`key_size`: tokens of a key. `border`: tokens between the borders at which every group
        can begin from the cache; a multiple of it.
        """
        self._pool = pool
        self._groups = groups
        self._key_size = key_size
        self._border = border
        self._interval = max(border, -(-interval // border) * border)
        self._most = pool.num_blocks if most is None else most
        self._num_pending = 0
        """Blocks of snapshots that are being made."""
        self._copies: list[tuple[int, int]] = []
        self._zeroed: list[int] = []
        self._sources: list[int] = []
        """Snapshots that the next plan copies from; they keep a reference until then."""
        self._writing: dict[bytes, Request] = {}
        """Keys of snapshots that a running request will make."""

    def snapshots(self, request: Request, hit: int) -> list[int]:
        """The blocks that a request starts from after a hit of `hit` tokens."""
        if hit == 0:
            return []
        key = self._key(request, hit)
        found = [self._pool.find((key, group)) for group in self._groups]
        assert None not in found, "a hit was cut short between counting and taking it"
        return [block for block in found if block is not None]

    def start(self, request: Request, hit: int, *, makes_snapshots: bool) -> None:
        """Give a request that enters a row its rings; their first blocks get the state after `hit`
        tokens.
        """
        sources = self.snapshots(request, hit)
        is_free = [self._pool.is_free(source) for source in sources]
        # held first: allocating the rings evicts what nobody holds
        self._pool.touch(sources)
        request.num_state_updates = 0
        for i, (number, group) in enumerate(self._groups.items()):
            ring = request.block_ids[number]
            if hit and request.takes_snapshot and is_free[i]:
                # the request writes over it
                self._pool.forget(sources[i])
                ring.append(sources[i])
            ring += self._allocate(group.ring_size - len(ring))
            if not hit:
                self._zeroed.append(ring[0])
            elif ring[0] != sources[i]:
                self._copies.append((sources[i], ring[0]))
                self._sources.append(sources[i])
        if makes_snapshots:
            request.snapshot_ends = self._ends(request, hit)
            for end in request.snapshot_ends:
                self._writing.setdefault(self._key(request, end), request)

    def is_being_written(self, request: Request, hit: int) -> bool:
        """Whether a running request will make a snapshot that extends this request's hit."""
        return any(self._key(request, end) in self._writing for end in self._ends(request, hit))

    def make_snapshot(self, request: Request) -> None:
        """Have the next plan copy the request's current state, at the first of its
        `snapshot_ends`. Where there are no blocks for it, this one is left out.
        """
        end = request.snapshot_ends.pop(0)
        blocks = self._make_room(len(self._groups))
        if blocks is None:
            self._forget_plan(request, end)
        else:
            request.snapshots[end] = blocks
            self._num_pending += len(blocks)
            for (number, group), block in zip(self._groups.items(), blocks, strict=True):
                ring = request.block_ids[number]
                self._copies.append((ring[request.num_state_updates % group.ring_size], block))

    def give_up(self, requests: Iterable[Request]) -> bool:
        """Give up the snapshots of these requests that steps in flight, or the current plan, still
        make; False if there are none.
        """
        found = [request for request in requests if request.snapshots]
        for request in found:
            dropped = {block for blocks in request.snapshots.values() for block in blocks}
            # whoever gets these blocks next must not find a copy in them
            self._copies = [copy for copy in self._copies if copy[1] not in dropped]
            for end in list(request.snapshots):
                self._forget_plan(request, end)
        return bool(found)

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make snapshots findable once steps up to `num_tokens` tokens have succeeded."""
        # the copy is made by the step after the chunk that ends there
        for end in [end for end in request.snapshots if end < num_tokens]:
            for group, block in zip(self._groups, request.snapshots[end], strict=True):
                self._pool.publish(block, (self._key(request, end), group), request, end)
            self._forget_plan(request, end)

    def load_cost(self, request: Request, end: int) -> int:
        """The free blocks that a snapshot at `end`, which a tier has, takes if it is loaded."""
        return 0 if self._is_cached(request, end) else len(self._groups)

    def begin_load(self, request: Request, end: int) -> list[tuple[int, BlockKey]] | None:
        """Give a waiting request blocks for the snapshot at `end`, and return them with the keys of
        what is to be loaded; none, where it is cached. None, and no change, where snapshots have no
        room.
        """
        if self._is_cached(request, end):
            return []
        blocks = self._make_room(len(self._groups))
        if blocks is None:
            return None
        key = self._key(request, end)
        request.snapshots[end] = blocks
        self._num_pending += len(blocks)
        self._writing.setdefault(key, request)
        return [(block, (key, group)) for block, group in zip(blocks, self._groups, strict=True)]

    def _is_cached(self, request: Request, end: int) -> bool:
        key = self._key(request, end)
        return all(self._pool.find((key, group)) is not None for group in self._groups)

    def end_load(self, request: Request, end: int, *, is_done: bool) -> None:
        """The snapshot at `end` is loaded, or is not."""
        if is_done and end in request.snapshots:
            for group, block in zip(self._groups, request.snapshots[end], strict=True):
                self._pool.publish(block, (self._key(request, end), group), request, end)
        self._forget_plan(request, end)

    def release(self, request: Request) -> None:
        """Forget a request whose rings are given back, and changes that are planned for it."""
        mine = {block for number in self._groups for block in request.block_ids[number]}
        mine.update(block for blocks in request.snapshots.values() for block in blocks)
        self._copies = [(source, target) for source, target in self._copies if target not in mine]
        self._zeroed = [block for block in self._zeroed if block not in mine]
        for end in [*request.snapshots, *request.snapshot_ends]:
            self._forget_plan(request, end)
        request.snapshot_ends = []

    def take_changes(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the current plan's copies and blocks to zero."""
        changes = self._copies, self._zeroed
        # whoever gets them from now on writes in a later step
        self._pool.release(self._sources)
        self._copies, self._zeroed, self._sources = [], [], []
        return changes

    def _ends(self, request: Request, after: int) -> list[int]:
        """Positions of snapshots of the request's known tokens, beyond `after` tokens; none
        where no chunk may end.
        """
        last = (request.num_tokens - 1) // self._border * self._border
        first = (after // self._interval + 1) * self._interval
        ends = list(range(first, last, self._interval))
        ends = [*ends, last] if last > after else ends
        return [end for end in ends if request.end_of_chunk(after, end) == end]

    def _make_room(self, count: int) -> list[int] | None:
        """Blocks for a snapshot, within what snapshots may have; None if there are none."""
        while self._pool.num_early + self._num_pending + count > self._most:
            if not self._pool.drop_earliest():
                return None
        return self._pool.allocate(count)

    def _allocate(self, count: int) -> Sequence[int]:
        blocks = self._pool.allocate(count)
        assert blocks is not None, "the cost of admission left no blocks for its state"
        return blocks

    def _forget_plan(self, request: Request, end: int) -> None:
        """The snapshot at `end` is made, or it will not be."""
        blocks = request.snapshots.pop(end, [])
        self._num_pending -= len(blocks)
        self._pool.release(blocks)
        if self._writing.get(key := self._key(request, end)) is request:
            del self._writing[key]

    def _key(self, request: Request, num_tokens: int) -> bytes:
        """The key of the state after the first `num_tokens` tokens, a border."""
        return request.keys[num_tokens // self._key_size - 1]
