"""The blocks of requests: prefix-cache hits, growth with the tokens, release, and publication of
full blocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping

from quire.scheduling.block_groups import (
    BlockGroup,
    EmptyGroup,
    Find,
    SourceGroup,
    StateGroup,
    block_group,
)
from quire.scheduling.block_pool import BlockPool, next_key, root_key
from quire.scheduling.request import Request
from quire.scheduling.settings import SchedulerConfig
from quire.scheduling.source_blocks import SourceBlocks
from quire.scheduling.state_blocks import StateBlocks
from quire.step.plan import NULL_BLOCK, NewBlocks
from quire.step.transfers import BlockKey

_TO_LOAD = -1
"""Placeholder of a block that a tier has."""


class BlockTables:
    """The block tables of all requests over one shared pool, one table per KV group.

    Entries that are no longer read are the null block. Keys are made for every `key_size` tokens;
    a group with larger blocks uses every n-th of them.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.key_size = config.key_size
        self.groups: list[BlockGroup] = [
            block_group(spec, config.key_size, config.num_drafts) for spec in config.groups
        ]
        states = {g: each for g, each in enumerate(self.groups) if isinstance(each, StateGroup)}
        self.pool = BlockPool(config.num_blocks, evicted_first=states)
        self.states = self._state_blocks(config, states) if states else None
        """The blocks of the groups with recurrent state, if the model has any."""
        is_reusable = not any(isinstance(group, EmptyGroup) for group in self.groups)
        self.keeps_blocks = not all(isinstance(group, EmptyGroup) for group in self.groups)
        """Whether requests take blocks."""
        self.shares_blocks = config.shares_blocks and is_reusable
        sources = {g: each for g, each in enumerate(self.groups) if isinstance(each, SourceGroup)}
        self.sources: SourceBlocks | None = None
        """The blocks of the groups of cross-attention, if the model has any."""
        if sources:
            are_shared = self.shares_blocks
            self.sources = SourceBlocks(self.pool, sources, are_shared=are_shared)
        self._token_groups = [
            g for g, spec in enumerate(config.groups) if spec.kind in ("full", "sliding")
        ]
        self._forgets = any(spec.kind == "sliding" for spec in config.groups)
        depth = max(2, config.steps.max_steps_in_flight)
        self._decode_chunk = 1 + depth * config.num_drafts + depth - 2
        """The most tokens between the first position of which a decoding request keeps what is read
        and the end of its next step, with all other steps in flight.
        """
        self._writing: dict[bytes, Request] = {}
        """Keys of prompt blocks that a running request will compute next."""

    def _state_blocks(
        self, config: SchedulerConfig, states: Mapping[int, StateGroup]
    ) -> StateBlocks:
        return StateBlocks(
            self.pool,
            states,
            key_size=config.key_size,
            border=math.lcm(*(group.block_size for group in self.groups)),
            interval=config.snapshot_interval,
            most=config.num_snapshot_blocks,
        )

    def num_needed(self, request: Request) -> int:
        """The most blocks that the request, alone, ever has to hold at once."""
        total, chunk = request.max_total_tokens, self._least_chunk(request)
        source = 0 if self.sources is None else self.sources.num_needed(request)
        return source + sum(group.num_needed(total, chunk) for group in self.groups)

    def compute_keys(self, request: Request) -> None:
        """Compute the keys of the request's full blocks, so that this cannot fail in a step."""
        if self.shares_blocks:
            self._extend_keys(request, request.num_tokens // self.key_size)

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        """Compute the request's keys up to `num_blocks` blocks, each once in its life (the tokens
        must be known).
        """
        keys = request.keys
        while len(keys) < num_blocks:
            start = len(keys) * self.key_size
            end = start + self.key_size
            parent = keys[-1] if keys else self._root_key(request)
            embedded = request.embedded_in(start, end) if request.embedded else b""
            keys.append(next_key(parent, request.token_ids(start, end), embedded))

    @staticmethod
    def _root_key(request: Request) -> bytes:
        source = b"" if request.source is None else request.source.digest
        return root_key(request.cache_salt, request.adapter, request.weights, source)

    # Resources

    def find_hit(self, request: Request) -> int:
        """Set and return `num_hit_tokens`: how many leading tokens are cached for every group. The
        last token is always excluded, because its logits are needed.
        """
        request.num_hit_tokens = request.num_unloaded_tokens = 0
        if self.sources is not None:
            self.sources.find(request, self._root_key(request))
        if self.shares_blocks and not request.params.skip_reading_prefix_cache:
            self.compute_keys(request)
            request.num_hit_tokens = self._longest_hit(request, self._finder)
        return request.num_hit_tokens

    def _longest_hit(self, request: Request, finder: Callable[[Request, int], Find]) -> int:
        """Return the longest hit of all groups: each can only shorten it, so this terminates."""
        length = (request.num_tokens - 1) // self.key_size * self.key_size
        while True:
            before = length
            for index, group in enumerate(self.groups):
                size = group.block_size
                length = group.longest_hit(finder(request, index), length // size) * size
            # no chunk may begin within a picture whose positions see each other
            if request.media:
                length = request.end_of_chunk(0, length) // self.key_size * self.key_size
            if length == before:
                return length

    def begin_load(
        self, request: Request, has: Callable[[BlockKey], bool], outstanding: int
    ) -> list[tuple[int, BlockKey]]:
        """Extend the hit of a waiting request by what a tier `has`: the request holds the blocks of
        the longer hit from now on, and those that have to be loaded are returned with their keys.

        None, and no change, where the hit is not longer, and where so many blocks are not free
        beside `outstanding` ones. Of recurrent state the snapshot at the end of the hit is loaded,
        which becomes a cached one like others.
        """
        if not self.shares_blocks:
            return []
        if request.params.skip_reading_prefix_cache:
            return []

        def finder(request: Request, group: int) -> Find:
            def find(index: int) -> int | None:
                key = self._key(request, group, index)
                block = self.pool.find(key)
                return _TO_LOAD if block is None and has(key) else block

            return find

        length = self._longest_hit(request, finder)
        if length <= request.num_hit_tokens:
            return []
        tables = [
            group.hit_blocks(finder(request, index), length // group.block_size)
            for index, group in enumerate(self.groups)
        ]
        found = [block for table in tables for block in table if block != NULL_BLOCK]
        cached = [block for block in found if block != _TO_LOAD]
        # a cached block that nobody holds counts as free until it is held
        cost = len(found) - len(cached) + sum(map(self.pool.is_free, cached))
        if self.states is not None:
            cost += self.states.load_cost(request, length)
        if cost + outstanding > self.pool.num_free:
            return []
        # held first: `allocate` evicts what nobody holds
        self.pool.touch(cached)
        loaded: list[tuple[int, BlockKey]] = []
        if self.states is not None:
            snapshot = self.states.begin_load(request, length)
            if snapshot is None:
                self.pool.release(cached)
                return []
            loaded += snapshot
        blocks = iter(self.pool.allocate(len(found) - len(cached)) or ())
        for number, table in enumerate(tables):
            for index, block in enumerate(table):
                if block == _TO_LOAD:
                    table[index] = next(blocks)
                    loaded.append((table[index], self._key(request, number, index)))
        request.block_ids = tuple(tables)
        request.num_published_tokens = request.num_hit_tokens
        # others that want the same wait for this load
        for key in request.keys[request.num_hit_tokens // self.key_size : length // self.key_size]:
            self._writing.setdefault(key, request)
        request.num_hit_tokens = length
        return loaded

    def end_load(self, request: Request, num_tokens: int, *, is_done: bool) -> None:
        """The blocks of `begin_load`, for a hit of `num_tokens` tokens, are loaded, or are not; the
        request holds none of them any more.
        """
        if is_done:
            self.publish(request, num_tokens)
        if self.states is not None:
            self.states.end_load(request, num_tokens, is_done=is_done)
        self.release(request)

    def is_being_written(self, request: Request) -> bool:
        """Whether a running request will next compute blocks that extend the hit, or the source, so
        that waiting for it saves computing them twice.
        """
        if self.sources is not None and self.sources.is_being_written(request):
            return True
        if not self.shares_blocks or request.params.skip_reading_prefix_cache:
            return False
        if self.states is not None:
            return self.states.is_being_written(request, request.num_hit_tokens)
        index = request.num_hit_tokens // self.key_size
        usable = (request.num_tokens - 1) // self.key_size
        return index < usable and request.keys[index] in self._writing

    def admission_cost(self, request: Request) -> int:
        """The free blocks needed for all tokens of the request, including blocks of its hit that
        are free now, but for its snapshot.
        """
        chunk = self._least_chunk(request)
        cost = 0 if self.sources is None else self.sources.cost(request)
        for index, group in enumerate(self.groups):
            held = [block for block in self._hit_table(request, index) if block != NULL_BLOCK]
            cost += max(0, group.num_needed(request.num_tokens, chunk) - len(held))
            cost += sum(map(self.pool.is_free, held))
        return cost

    def snapshot_cost(self, request: Request) -> int:
        """The free blocks needed in addition if the snapshot of the hit is to stay."""
        if self.states is None:
            return 0
        snapshots = self.states.snapshots(request, request.num_hit_tokens)
        return sum(map(self.pool.is_free, snapshots))

    def outstanding(self, requests: Iterable[Request]) -> int:
        """Blocks that running requests still need for the tokens they have."""
        total = 0
        for request in requests:
            for group, table in zip(self.groups, request.block_ids, strict=True):
                held = len(table) - table.count(NULL_BLOCK)
                total += max(0, group.num_needed(request.num_tokens, 1) - held)
        return total

    def take_hit(self, request: Request) -> None:
        """Give the request the cached blocks of its hit, before it computes the other tokens."""
        hit = request.num_hit_tokens
        tables = []
        for index in range(len(self.groups)):
            table = self._hit_table(request, index)
            # held first, as in `begin_load`
            self.pool.touch(block for block in table if block != NULL_BLOCK)
            tables.append(table)
        if request.num_unloaded_tokens:
            for group, table in zip(self.groups, tables, strict=True):
                blocks = self.pool.allocate(group.num_blocks(hit) - len(table))
                assert blocks is not None, "the cost of admission counts them"
                table += blocks
        request.block_ids = tuple(tables)
        if self.sources is not None:
            self.sources.hold(request)
        request.num_expired = [group.num_unread(hit) for group in self.groups]
        cached = hit - request.num_unloaded_tokens
        request.num_published_tokens = cached
        request.capacity = self._capacity(request)
        if self.states is not None:
            makes_snapshots = self.shares_blocks and not request.is_whole
            self.states.start(request, hit, makes_snapshots=makes_snapshots)
        if self.sources is not None:
            self.sources.allocate(request)
        if self.shares_blocks:
            for key in request.keys[cached // self.key_size :]:
                self._writing.setdefault(key, request)

    # Growth

    def grow(
        self, request: Request, want: int, least: int = 1
    ) -> tuple[int, list[NewBlocks]] | None:
        """Make the tables cover the next `want` tokens, or as many of them as there are blocks for,
        but none beyond a border at which the state is to be kept.

        Returns the number of tokens and the new blocks; None (and no change) if it is less than
        `least`.
        """
        computed = request.num_computed_tokens
        if request.snapshot_ends:
            end = next((end for end in request.snapshot_ends if end > computed), computed + want)
            want = min(want, end - computed)
        # a bound without looking at the tables, which suffices unless the pool is nearly full
        most_missing = len(self.groups) * (want // self.key_size + 1)
        if most_missing > self.pool.num_free:
            want = self._fitting(request, want)
            if want < least:
                return None
        grown = []
        for number, group in enumerate(self.groups):
            table = request.block_ids[number]
            count = group.num_blocks(computed + want) - len(table)
            if count > 0:
                blocks = self.pool.allocate(count)
                assert blocks is not None, "more blocks were promised than are free"
                grown.append(NewBlocks(request.row, number, len(table), blocks))
                table += blocks
        if grown:
            request.capacity = self._capacity(request)
        if self.states is not None and request.snapshot_ends[:1] == [computed]:
            self.states.make_snapshot(request)
        return want, grown

    def _fitting(self, request: Request, want: int) -> int:
        """The most of the next `want` tokens for which there are blocks."""
        computed, fits, exceeds = request.num_computed_tokens, 0, want + 1
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if self._num_missing(request, computed + middle) <= self.pool.num_free:
                fits = middle
            else:
                exceeds = middle
        return fits

    def _num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the tables lack to cover `num_tokens` tokens."""
        total, tables = 0, request.block_ids
        for number, group in enumerate(self.groups):
            missing = group.num_blocks(num_tokens) - len(tables[number])
            if missing > 0:
                total += missing
        return total

    def _capacity(self, request: Request) -> int:
        """The number of tokens that the request's blocks hold."""
        capacity = sys.maxsize
        for number in self._token_groups:
            size = len(request.block_ids[number]) * self.groups[number].block_size
            if size < capacity:
                capacity = size
        return capacity

    def give_up_snapshots(self, requests: Iterable[Request]) -> bool:
        """Free the blocks of snapshots that are being made, which nobody needs; False if there are
        none.
        """
        return self.states is not None and self.states.give_up(requests)

    def release_unread(self, request: Request, position: int) -> None:
        """Release the blocks that no query at `position` or later reads."""
        if not self._forgets:
            return
        for index, group in enumerate(self.groups):
            start, table = request.num_expired[index], request.block_ids[index]
            end = min(group.num_unread(position), len(table))
            if start < end:
                self.pool.release(table[start:end])
                table[start:end] = [NULL_BLOCK] * (end - start)
                request.num_expired[index] = end

    # The end

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens, whose K/V is written, findable."""
        if self.sources is not None and num_tokens > request.num_hit_tokens:
            self.sources.confirm(request)
        if not self.shares_blocks:
            return
        if self.states is not None:
            self.states.publish(request, num_tokens)
        first = request.num_published_tokens // self.key_size
        end = num_tokens // self.key_size
        if end <= first:
            return
        self._extend_keys(request, end)
        for number in self._token_groups:
            self._publish_table(request, number, num_tokens)
        for key in request.keys[first:end]:
            if self._writing.get(key) is request:
                del self._writing[key]
        request.num_published_tokens = end * self.key_size

    def _publish_table(self, request: Request, number: int, num_tokens: int) -> None:
        size, table = self.groups[number].block_size, request.block_ids[number]
        for index in range(request.num_published_tokens // size, num_tokens // size):
            if table[index] != NULL_BLOCK:
                key = self._key(request, number, index)
                self.pool.publish(table[index], key, request, (index + 1) * size)

    def release(self, request: Request) -> None:
        """Release all blocks of the request, the tail first."""
        if self.states is not None:
            self.states.release(request)
        # the tail first, so that it is evicted before the beginning, which more prompts share
        for table in request.block_ids:
            self.pool.release(block for block in reversed(table) if block != NULL_BLOCK)
        request.block_ids = ()
        self._write_no_more(request)
        request.num_published_tokens = 0

    def rename(self, request: Request) -> None:
        """New keys for a request that has changed: from now on its blocks are published
        under other ones.
        """
        self._write_no_more(request)
        request.keys.clear()
        self.compute_keys(request)

    def _write_no_more(self, request: Request) -> None:
        if self.sources is not None:
            self.sources.write_no_more(request)
        for key in request.keys[request.num_published_tokens // self.key_size :]:
            if self._writing.get(key) is request:
                del self._writing[key]

    def take_state_changes(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the current plan's copies of recurrent state and blocks to zero."""
        return ([], []) if self.states is None else self.states.take_changes()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False (and no change) while any block is in use."""
        # one block is the null block, which is never free
        if self.pool.num_free != self.pool.num_blocks - 1:
            return False
        self.pool.forget_all()
        return True

    def _least_chunk(self, request: Request) -> int:
        """The tokens that one step must at least be able to compute for the request."""
        if request.is_whole:
            return request.num_tokens
        wholes = (item.whole for item in request.media if item.whole is not None)
        return max(self._decode_chunk, max((stop - start for start, stop in wholes), default=0))

    def _key(self, request: Request, group: int, index: int) -> tuple[bytes, int]:
        stride = self.groups[group].block_size // self.key_size
        return request.keys[(index + 1) * stride - 1], group

    def _finder(self, request: Request, group: int) -> Find:
        return lambda index: self.pool.find(self._key(request, group, index))

    def _hit_table(self, request: Request, group: int) -> list[int]:
        size = self.groups[group].block_size
        num_blocks = (request.num_hit_tokens - request.num_unloaded_tokens) // size
        return self.groups[group].hit_blocks(self._finder(request, group), num_blocks)
