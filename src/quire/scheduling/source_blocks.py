"""Keys and values of second contents in blocks of the pool: what cross-attention reads."""

from __future__ import annotations

from collections.abc import Mapping

from quire.scheduling.block_groups import SourceGroup
from quire.scheduling.block_pool import BlockPool, next_key
from quire.scheduling.request import Request
from quire.step.transfers import BlockKey


class SourceBlocks:
    """The blocks of the KV groups of cross-attention, by group number.

    A source is whole from the first step of its request on, so that its blocks do not grow. The
    first chunk of the first request that has it writes them, and they are findable by the source's
    digest once that step has succeeded: requests with the same source, and the request itself after
    a preemption, read them as long as they are cached. A request that finds only some of them
    writes all, into blocks of its own.
    """

    def __init__(
        self, pool: BlockPool, groups: Mapping[int, SourceGroup], *, are_shared: bool
    ) -> None:
        """are_shared: whether a request may read what another one has written."""
        self._pool = pool
        self._groups = groups
        self._are_shared = are_shared
        self._writing: dict[bytes, Request] = {}
        """Names of sources whose blocks a running request will have written soon."""

    def num_needed(self, request: Request) -> int:
        return sum(group.num_source_blocks(_num_rows(request)) for group in self._groups.values())

    def find(self, request: Request, name: bytes) -> None:
        """Look whether the blocks of a waiting request's source are cached; `name` is that of the
        source, with all else that determines its keys and values.
        """
        request.source_name = name
        request.writes_source = self._cached(request) is None

    def is_being_written(self, request: Request) -> bool:
        """Whether another request writes what this one would write as well."""
        return request.writes_source and request.source_name in self._writing

    def cost(self, request: Request) -> int:
        """The free blocks that the source takes when the request enters a row."""
        cached = self._cached(request)
        if cached is None:
            return self.num_needed(request)
        return sum(self._pool.is_free(block) for table in cached.values() for block in table)

    def hold(self, request: Request) -> None:
        """Give the request the cached blocks of its source, before it takes any others."""
        # before any allocation, which could evict what was found
        cached = None if request.writes_source else self._cached(request)
        for number, table in ({} if cached is None else cached).items():
            self._pool.touch(table)
            request.block_ids[number].extend(table)

    def allocate(self, request: Request) -> None:
        """Give the request blocks for the source that it writes, after all that it found."""
        if not request.writes_source:
            return
        for number, group in self._groups.items():
            blocks = self._pool.allocate(group.num_source_blocks(_num_rows(request)))
            assert blocks is not None, "the cost of admission counts the source"
            request.block_ids[number].extend(blocks)
        if self._are_shared:
            self._writing[request.source_name] = request

    def confirm(self, request: Request) -> None:
        """The first chunk of the request has succeeded, and has written its source."""
        if not request.writes_source:
            return
        request.writes_source = False
        if self._are_shared:
            for number in self._groups:
                for index, block in enumerate(request.block_ids[number]):
                    self._pool.publish(block, self._key(request, number, index), request, 0)
        self.write_no_more(request)

    def write_no_more(self, request: Request) -> None:
        """The request leaves its row, or has written its source."""
        if self._writing.get(request.source_name) is request:
            del self._writing[request.source_name]

    def _cached(self, request: Request) -> dict[int, list[int]] | None:
        """The cached tables of a source; None unless all blocks are there."""
        if not self._are_shared:
            return None
        tables = {}
        for number, group in self._groups.items():
            table = []
            for index in range(group.num_source_blocks(_num_rows(request))):
                block = self._pool.find(self._key(request, number, index))
                if block is None:
                    return None
                table.append(block)
            tables[number] = table
        return tables

    @staticmethod
    def _key(request: Request, number: int, index: int) -> BlockKey:
        return next_key(request.source_name, [index]), number


def _num_rows(request: Request) -> int:
    assert request.source is not None, "the scheduler checks that there is a source"
    return request.source.num_rows
