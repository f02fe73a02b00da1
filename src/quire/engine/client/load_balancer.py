"""Which core gets a request: the one with the least to do, unless another has its beginning in the
prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from quire.engine.wire.messages import EngineCoreRequest, SchedulerStats

CHUNK_TOKENS = 128
"""Prompts are compared in steps of so many tokens."""
MAX_CHUNKS = 50_000
"""So many beginnings are remembered, the latest used ones."""
AFFINITY = 4.0
"""A prompt that a core has seen whole weighs as much as so many requests in front of it."""


class LoadBalancer:
    """Counts what each core has been given and remembers who saw which beginning of a prompt.

    The load of a core is the larger of what this front end gave it (times the number of front
    ends) and what the core said last; waiting requests count more when its KV cache fills up.
    """

    def __init__(self, num_clients: int = 1) -> None:
        self._num_clients = num_clients
        self._given: dict[int, int] = {}
        self._stats: dict[int, SchedulerStats] = {}
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._turn = 0

    def choose(self, request: EngineCoreRequest, engine_indices: Sequence[int]) -> int:
        """The best of these cores for the request, which counts as given to it."""
        if len(engine_indices) == 1:
            self._given[engine_indices[0]] = self._given.get(engine_indices[0], 0) + 1
            return engine_indices[0]
        self._turn += 1
        start = self._turn % len(engine_indices)
        rotated = [*engine_indices[start:], *engine_indices[:start]]
        keys = list(_beginnings(request))
        shares = self._shares(keys)
        best = min(rotated, key=lambda index: self._load(index) - AFFINITY * shares.get(index, 0.0))
        self._give(keys, best)
        return best

    def note(self, request: EngineCoreRequest, engine_index: int) -> None:
        """The request goes to this core, whatever the load."""
        self._give(list(_beginnings(request)), engine_index)

    def release(self, engine_index: int) -> None:
        """One request of this core has ended."""
        self._given[engine_index] = max(0, self._given.get(engine_index, 0) - 1)

    def note_stats(self, engine_index: int, stats: SchedulerStats) -> None:
        """What a core said of itself after a step."""
        self._stats[engine_index] = stats

    def forget(self, engine_index: int) -> None:
        """A core has lost what it had: its load and its prefix cache."""
        self._given.pop(engine_index, None)
        self._stats.pop(engine_index, None)
        for key in [key for key, index in self._seen.items() if index == engine_index]:
            del self._seen[key]

    def _load(self, engine_index: int) -> float:
        own = self._num_clients * self._given.get(engine_index, 0)
        stats = self._stats.get(engine_index)
        if stats is None:
            return own
        said = stats.num_waiting_reqs + stats.num_running_reqs
        crowd = stats.num_waiting_reqs * 6 * max(0.0, stats.kv_cache_usage - 0.5)
        return max(own, said if self._num_clients > 1 else 0) + crowd

    def _shares(self, keys: list[int]) -> dict[int, float]:
        """How much of the prompt each core has seen, from 0 to 1."""
        shares: dict[int, float] = {}
        for count, key in enumerate(keys, start=1):
            index = self._seen.get(key)
            if index is None:
                break
            shares[index] = count / len(keys)
        return shares

    def _give(self, keys: list[int], engine_index: int) -> None:
        self._given[engine_index] = self._given.get(engine_index, 0) + 1
        for key in keys:
            self._seen[key] = engine_index
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_CHUNKS:
            self._seen.popitem(last=False)


def _beginnings(request: EngineCoreRequest) -> Iterator[int]:
    """A key for each beginning of the prompt that is a whole number of chunks long. A collision
    costs speed, not truth.
    """
    ids, key = request.prompt_token_ids, hash(request.cache_salt)
    for start in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        key = hash((key, *ids[start : start + CHUNK_TOKENS]))
        yield key
