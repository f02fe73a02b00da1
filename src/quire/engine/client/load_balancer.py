"""Which core has which request, and which one gets the next: the least loaded core, unless another
has the beginning of the prompt in its prefix cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from quire.engine.wire.messages import EngineCoreRequest, SchedulerStats

CHUNK_TOKENS = 128
"""Prompts are compared in steps of this many tokens."""
MAX_CHUNKS = 50_000
"""How many prefixes are remembered, the most recently used ones."""
AFFINITY = 4.0
"""A core that has seen the whole prompt may have this many more requests than another."""


class LoadBalancer:
    """Assigns requests to cores, and remembers which core has seen which prefix.

    The load of a core is the number of its requests; waiting ones count more when its KV cache
    fills up.
    """

    def __init__(self) -> None:
        self.owners: dict[int, int] = {}
        """The core of each live request, by the request's handle."""
        self._num_requests: Counter[int] = Counter()
        self._stats: dict[int, SchedulerStats] = {}
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._turn = 0

    def choose(self, request: EngineCoreRequest, engine_indices: Sequence[int]) -> int:
        """Assign the request to the best of these cores."""
        if len(engine_indices) == 1:
            self._assign(request, engine_indices[0], [])
            return engine_indices[0]
        self._turn += 1
        start = self._turn % len(engine_indices)
        rotated = [*engine_indices[start:], *engine_indices[:start]]
        keys = list(_prefix_keys(request))
        shares = self._shares(keys)
        best = min(rotated, key=lambda index: self._load(index) - AFFINITY * shares.get(index, 0.0))
        self._assign(request, best, keys)
        return best

    def pin(self, request: EngineCoreRequest, engine_index: int) -> None:
        """Assign the request to this core, whatever its load."""
        self._assign(request, engine_index, list(_prefix_keys(request)))

    def release(self, handle: int) -> int | None:
        """A request has ended; the core that had it."""
        engine_index = self.owners.pop(handle, None)
        if engine_index is not None:
            self._num_requests[engine_index] -= 1
        return engine_index

    def num_requests(self, engine_index: int) -> int:
        """How many requests the core has."""
        return self._num_requests[engine_index]

    def note_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        """Take what a core reported after a step."""
        self._stats[engine_index] = stats

    def forget(self, engine_index: int) -> None:
        """A core has lost everything: its requests and its prefix cache."""
        for handle in [h for h, owner in self.owners.items() if owner == engine_index]:
            del self.owners[handle]
        del self._num_requests[engine_index]
        self._stats.pop(engine_index, None)
        for key in [key for key, index in self._seen.items() if index == engine_index]:
            del self._seen[key]

    def _load(self, engine_index: int) -> float:
        stats = self._stats.get(engine_index)
        if stats is None:
            return self._num_requests[engine_index]
        crowd = stats.num_waiting_reqs * 6 * max(0.0, stats.kv_cache_usage - 0.5)
        return self._num_requests[engine_index] + crowd

    def _shares(self, keys: list[int]) -> dict[int, float]:
        """How much of the prompt each core has seen, from 0 to 1."""
        shares: dict[int, float] = {}
        for count, key in enumerate(keys, start=1):
            index = self._seen.get(key)
            if index is None:
                break
            shares[index] = count / len(keys)
        return shares

    def _assign(self, request: EngineCoreRequest, engine_index: int, keys: list[int]) -> None:
        self.owners[request.handle] = engine_index
        self._num_requests[engine_index] += 1
        for key in keys:
            self._seen[key] = engine_index
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_CHUNKS:
            self._seen.popitem(last=False)


def _prefix_keys(request: EngineCoreRequest) -> Iterator[int]:
    """A key for each prefix of the prompt that is a whole number of chunks long. A collision costs
    speed, not correctness.
    """
    ids, key = request.prompt_token_ids, hash(request.cache_salt)
    for start in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        key = hash((key, *ids[start : start + CHUNK_TOKENS]))
        yield key
