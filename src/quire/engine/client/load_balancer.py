"""Chooses a core: the least loaded one, unless another has cached the prompt's beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from quire.engine.wire.messages import EngineCoreRequest, SchedulerStats

CHUNK_TOKENS = 128
"""Prompts are compared in steps of this many tokens."""
MAX_CHUNKS = 50_000
"""Number of prefixes that are remembered, the most recently used ones."""
AFFINITY = 4.0
"""A core that has seen the whole prompt may have this many more requests than another."""


class LoadBalancer:
    """Chooses between cores by their loads, and remembers which core has seen which prefix."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._turn = 0

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, float]) -> int:
        """The best core for the request; `loads` gives the load of each core that may have it."""
        self._turn += 1
        engine_indices = list(loads)
        # `min` takes the first of equals: the start moves on, so that idle cores share what comes
        start = self._turn % len(engine_indices)
        rotated = [*engine_indices[start:], *engine_indices[:start]]
        keys = list(_prefix_keys(request))
        shares = self._shares(keys)
        best = min(rotated, key=lambda index: loads[index] - AFFINITY * shares.get(index, 0.0))
        self._remember(keys, best)
        return best

    def note_pinned(self, request: EngineCoreRequest, engine_index: int) -> None:
        self._remember(list(_prefix_keys(request)), engine_index)

    def forget(self, engine_index: int) -> None:
        """A core has lost its prefix cache."""
        for key in [key for key, index in self._seen.items() if index == engine_index]:
            del self._seen[key]

    def _shares(self, keys: list[int]) -> dict[int, float]:
        """Share of the prompt that each core has seen, from 0 to 1."""
        shares: dict[int, float] = {}
        # a core is remembered for a prefix by the last who had it, so the longest known one decides
        for count, key in enumerate(keys, start=1):
            index = self._seen.get(key)
            if index is None:
                break
            shares[index] = count / len(keys)
        return shares

    def _remember(self, keys: list[int], engine_index: int) -> None:
        for key in keys:
            self._seen[key] = engine_index
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_CHUNKS:
            self._seen.popitem(last=False)


def load_of(num_requests: int, stats: SchedulerStats) -> float:
    """The number of a core's requests; waiting ones count more when its KV cache fills up."""
    # a full cache means preemptions soon: what waits there waits longer than its number says
    return num_requests + stats.num_waiting_reqs * 6 * max(0.0, stats.kv_cache_usage - 0.5)


def _prefix_keys(request: EngineCoreRequest) -> Iterator[int]:
    """A key for each prefix of the prompt that is a whole number of chunks long, with the digests
    of the media in it, for each adapter its own. A collision costs speed, not correctness.
    """
    ids = request.prompt_token_ids
    items = [] if request.media is None else request.media.items
    adapter = None if request.adapter is None else request.adapter.folder
    key = hash((request.cache_salt, adapter, *(item.digest for item in items if not item.places)))
    for start in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        end = start + CHUNK_TOKENS
        media = [(i.digest, i.start - start) for i in items if i.start < end and start < i.end]
        key = hash((key, *ids[start:end], *media))
        yield key
