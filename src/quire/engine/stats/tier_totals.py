"""K/V that was copied out of the pool and back, between two lines of the log."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.kv_pool_size import gib
from quire.engine.wire.messages import SchedulerStats


@dataclass(slots=True)
class TierTotals:
    """Sums of the stats of steps."""

    queries: int = 0
    hits: int = 0
    load_bytes: int = 0
    store_bytes: int = 0

    def add(self, stats: SchedulerStats) -> None:
        """Count a step."""
        self.queries += stats.external_prefix_cache_queries
        self.hits += stats.external_prefix_cache_hits
        self.load_bytes += stats.kv_offload_load_bytes
        self.store_bytes += stats.kv_offload_store_bytes

    def take(self) -> str | None:
        """The sums since the last time, in words; None if nothing was copied or found."""
        queries, hits, loaded, stored = self.queries, self.hits, self.load_bytes, self.store_bytes
        self.queries = self.hits = self.load_bytes = self.store_bytes = 0
        if not (hits or loaded or stored):
            return None
        share = 100 * hits / max(1, queries)
        return (
            f"external hits {share:.1f} % ({hits} tokens), loaded {gib(loaded)}, "
            f"stored {gib(stored)}"
        )
