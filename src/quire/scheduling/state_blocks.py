"""Recurrent state in blocks of the pool: rings of blocks for requests, and snapshots for prefix
hits.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.scheduling.block_groups import StateGroup
from quire.scheduling.block_pool import BlockPool
from quire.scheduling.request import Request


class StateBlocks:
    """The blocks of the KV groups with recurrent state, by group number.

    A request starts with a zeroed state, or with a copy of a snapshot at a block border. A new
    snapshot is made at the last border of its prompt: a chunk ends there, the plan of the next
    chunk copies the state, and the copy is findable once that step has succeeded.
    """

    def __init__(self, pool: BlockPool, groups: Mapping[int, StateGroup], block_size: int) -> None:
        self._pool = pool
        self._groups = groups
        self._block_size = block_size
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

    def start(self, request: Request, hit: int, *, makes_snapshot: bool) -> None:
        """Give a request that enters a row its rings; their first blocks get the state after `hit`
        tokens.
        """
        sources = self.snapshots(request, hit)
        self._pool.touch(sources)
        self._sources += sources
        request.num_state_updates = 0
        for number, group in self._groups.items():
            ring = self._pool.allocate(group.ring_size)
            assert ring is not None, "the cost of admission left no blocks for its state"
            request.block_ids[number].extend(ring)
            if hit == 0:
                self._zeroed.append(ring[0])
        firsts = [request.block_ids[number][0] for number in self._groups]
        self._copies += zip(sources, firsts, strict=False)
        end = self._last_border(request)
        if makes_snapshot and end > hit:
            request.snapshot_end = end
            self._writing.setdefault(self._key(request, end), request)

    def is_being_written(self, request: Request, hit: int) -> bool:
        """Whether a running request will make a snapshot that extends this request's hit."""
        end = self._last_border(request)
        return end > hit and self._key(request, end) in self._writing

    def make_snapshot(self, request: Request) -> None:
        """Have the next plan copy the request's current state. Without free blocks there is no
        snapshot.
        """
        blocks = self._pool.allocate(len(self._groups))
        if blocks is None:
            self._give_up(request)
            return
        request.snapshot = blocks
        for (number, group), block in zip(self._groups.items(), blocks, strict=True):
            ring = request.block_ids[number]
            self._copies.append((ring[request.num_state_updates % group.ring_size], block))

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the snapshot findable once steps up to `num_tokens` tokens have succeeded."""
        if request.snapshot and num_tokens > request.snapshot_end:
            key = self._key(request, request.snapshot_end)
            for group, block in zip(self._groups, request.snapshot, strict=True):
                self._pool.publish(block, (key, group))
            self._give_up(request)

    def release(self, request: Request) -> None:
        """Forget a request whose rings are given back, and changes that are planned for it."""
        mine = {block for number in self._groups for block in request.block_ids[number]}
        mine.update(request.snapshot)
        self._copies = [(source, target) for source, target in self._copies if target not in mine]
        self._zeroed = [block for block in self._zeroed if block not in mine]
        self._give_up(request)

    def take_changes(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the current plan's copies and blocks to zero."""
        changes = self._copies, self._zeroed
        self._pool.release(self._sources)
        self._copies, self._zeroed, self._sources = [], [], []
        return changes

    def _give_up(self, request: Request) -> None:
        """Cancel the request's snapshot."""
        self._pool.release(request.snapshot)
        if request.snapshot_end and self._writing.get(key := self._end_key(request)) is request:
            del self._writing[key]
        request.snapshot, request.snapshot_end = [], 0

    def _end_key(self, request: Request) -> bytes:
        return self._key(request, request.snapshot_end)

    def _key(self, request: Request, num_tokens: int) -> bytes:
        """The key of the state after the first `num_tokens` tokens, a block border."""
        return request.keys[num_tokens // self._block_size - 1]

    def _last_border(self, request: Request) -> int:
        """The last block border that leaves the request a token to compute."""
        return (request.num_tokens - 1) // self._block_size * self._block_size
