"""K/V that was copied out of the pool and back, between two lines of the log."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.kv_pool_size import gib
from quire.engine.wire.messages import SchedulerStats

TIER_COUNTERS = (
    *("external_prefix_cache_queries", "external_prefix_cache_hits"),
    *("kv_offload_load_bytes", "kv_offload_store_bytes"),
    *("nixl_bytes_transferred", "nixl_num_descriptors"),
    *("nixl_num_failed_transfers", "nixl_num_kv_expired_reqs"),
)
"""Fields of `SchedulerStats` that are counters of K/V outside of the pool."""


@dataclass(slots=True)
class TierTotals:
    """Sums of the stats of steps."""

    queries: int = 0
    hits: int = 0
    load_bytes: int = 0
    store_bytes: int = 0
    pulled_bytes: int = 0
    num_failed: int = 0
    num_expired: int = 0

    def add(self, stats: SchedulerStats) -> None:
        self.queries += stats.external_prefix_cache_queries
        self.hits += stats.external_prefix_cache_hits
        self.load_bytes += stats.kv_offload_load_bytes
        self.store_bytes += stats.kv_offload_store_bytes
        self.pulled_bytes += stats.nixl_bytes_transferred
        self.num_failed += stats.nixl_num_failed_transfers
        self.num_expired += stats.nixl_num_kv_expired_reqs

    def take(self) -> str | None:
        """The sums since the last time, in words; None if nothing was copied or found."""
        queries, hits, loaded, stored = self.queries, self.hits, self.load_bytes, self.store_bytes
        self.queries = self.hits = self.load_bytes = self.store_bytes = 0
        pulled, failed, expired = self.pulled_bytes, self.num_failed, self.num_expired
        self.pulled_bytes = self.num_failed = self.num_expired = 0
        if not (hits or loaded or stored or pulled or failed or expired):
            return None
        share = 100 * hits / max(1, queries)
        text = (
            f"external hits {share:.1f} % ({hits} tokens), loaded {gib(loaded)}, "
            f"stored {gib(stored)}"
        )
        if pulled or failed or expired:
            text += f", pulled {gib(pulled)}, {failed} pulls failed, {expired} leases expired"
        return text
