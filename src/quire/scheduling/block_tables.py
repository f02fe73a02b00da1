"""Blocks for requests: hits in the prefix cache, growth with the tokens, release, and publication
of finished blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.scheduling.block_groups import BlockGroup, Find, FullGroup, SlidingGroup, hit_blocks
from quire.scheduling.block_pool import BlockPool
from quire.scheduling.prefix_cache import extend_keys
from quire.scheduling.request import Request
from quire.scheduling.step import NULL_BLOCK, NewBlocks


class BlockTables:
    """The block tables of all requests over one shared pool.

    `windows` has an entry for each KV group: None for layers that read everything, else the
    sliding window in tokens.
    Tables of one request have equal lengths; entries that nobody reads any more are the null block.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.groups: list[BlockGroup] = [
            FullGroup(block_size) if window is None else SlidingGroup(block_size, window)
            for window in windows
        ]
        self.enable_prefix_caching = enable_prefix_caching
        self._forgets = any(window is not None for window in windows)
        self._writing: dict[bytes, Request] = {}
        """Keys of prompt blocks that a running request is about to compute."""

    def num_needed(self, num_tokens: int, chunk: int = 1) -> int:
        """The most blocks that one request of this length holds at once."""
        return sum(group.num_needed(num_tokens, chunk) for group in self.groups)

    def name(self, request: Request) -> None:
        """Compute the keys of the request's full blocks, so that this cannot fail in a step."""
        if self.enable_prefix_caching:
            extend_keys(request, self.block_size, request.num_tokens // self.block_size)

    # Admission

    def hit(self, request: Request) -> int:
        """How many leading tokens are cached for every group. The last token is always left: its
        logits are wanted.
        """
        if not self.enable_prefix_caching or request.params.skip_reading_prefix_cache:
            return 0
        limit = (request.num_tokens - 1) // self.block_size
        extend_keys(request, self.block_size, request.num_tokens // self.block_size)
        # Each group can only shorten the hit, so this ends where all agree.
        length = limit
        while True:
            before = length
            for index, group in enumerate(self.groups):
                length = group.longest_hit(self._finder(request, index), length)
            if length == before:
                return length * self.block_size

    def is_being_written(self, request: Request, hit: int) -> bool:
        """Is the block behind the hit being computed right now, so that waiting for it saves
        computing it twice?
        """
        index = hit // self.block_size
        usable = (request.num_tokens - 1) // self.block_size
        return (
            self.enable_prefix_caching
            and not request.params.skip_reading_prefix_cache
            and index < usable
            and request.keys[index] in self._writing
        )

    def admission_cost(self, request: Request, hit: int, chunk: int) -> int:
        """Free blocks that the whole request takes in steps of `chunk` tokens, a hit on a free
        block included.
        """
        cost = 0
        for index, group in enumerate(self.groups):
            held = [block for block in self._hit_table(request, index, hit) if block != NULL_BLOCK]
            cost += max(0, group.num_needed(request.num_tokens, chunk) - len(held))
            cost += sum(self.pool.is_free(block) for block in held)
        return cost

    def outstanding(self, requests: Iterable[Request]) -> int:
        """Blocks that running requests still need for the tokens they have."""
        total = 0
        for request in requests:
            for group, table in zip(self.groups, request.block_ids, strict=True):
                held = len(table) - table.count(NULL_BLOCK)
                total += max(0, group.num_needed(request.num_tokens, 1) - held)
        return total

    def adopt(self, request: Request, hit: int) -> None:
        """Give the request the cached blocks of its hit; it is about to compute the rest of its
        tokens.
        """
        tables = []
        for index in range(len(self.groups)):
            table = self._hit_table(request, index, hit)
            self.pool.touch(block for block in table if block != NULL_BLOCK)
            tables.append(table)
        request.block_ids = tuple(tables)
        request.num_expired = [group.num_unread(hit) for group in self.groups]
        request.num_published = hit // self.block_size
        if self.enable_prefix_caching:
            for key in request.keys[request.num_published :]:
                self._writing.setdefault(key, request)

    # Growth

    def room(self, request: Request, want: int) -> int:
        """The most of the next `want` tokens for which there are blocks."""
        if self._forgets:
            self._drop_unread(request)
        blocks = len(request.block_ids[0]) + self.pool.num_free // len(self.groups)
        return min(want, blocks * self.block_size - request.num_computed_tokens)

    def grow(self, request: Request, count: int) -> list[NewBlocks]:
        """Make the tables cover the next `count` tokens; `room` has said that they fit."""
        first = len(request.block_ids[0])
        missing = -(-(request.num_computed_tokens + count) // self.block_size) - first
        if missing <= 0:
            return []
        grown = []
        for index, table in enumerate(request.block_ids):
            blocks = self.pool.allocate(missing)
            assert blocks is not None, "grow() was called without room()"
            table += blocks
            grown.append(NewBlocks(request.row, index, first, blocks))
        return grown

    # The end

    def publish(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens have their K/V: make the full blocks among them
        findable.
        """
        end = num_tokens // self.block_size
        if not self.enable_prefix_caching or end <= request.num_published:
            return
        extend_keys(request, self.block_size, end)
        for index in range(request.num_published, end):
            key = request.keys[index]
            for number, table in enumerate(request.block_ids):
                if table[index] != NULL_BLOCK:
                    self.pool.publish(table[index], (key, number))
            if self._writing.get(key) is request:
                del self._writing[key]
        request.num_published = end

    def release(self, request: Request) -> None:
        """Take all blocks back, the tail first."""
        for table in request.block_ids:
            self.pool.release(block for block in reversed(table) if block != NULL_BLOCK)
        request.block_ids = ()
        for key in request.keys[request.num_published :]:
            if self._writing.get(key) is request:
                del self._writing[key]
        request.num_published = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False (and no change) while any block is in use."""
        if self.pool.num_free != self.pool.num_blocks - 1:
            return False
        self.pool.forget_all()
        return True

    def _finder(self, request: Request, group: int) -> Find:
        keys, find = request.keys, self.pool.find
        return lambda index: find((keys[index], group))

    def _hit_table(self, request: Request, group: int, hit: int) -> list[int]:
        finder = self._finder(request, group)
        return hit_blocks(self.groups[group], finder, hit // self.block_size, hit)

    def _drop_unread(self, request: Request) -> None:
        """Give back what lies behind every group's window."""
        for index, group in enumerate(self.groups):
            start, table = request.num_expired[index], request.block_ids[index]
            end = min(group.num_unread(request.num_computed_tokens), len(table))
            if start < end:
                self.pool.release(table[start:end])
                table[start:end] = [NULL_BLOCK] * (end - start)
                request.num_expired[index] = end
