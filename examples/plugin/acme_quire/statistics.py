"""A stat logger: counts generated tokens, which the route of endpoint.py shows."""

from typing import Any

from quire.engine.stats.loggers import StatLoggerBase

totals = {"generated": 0}


class TokenCount(StatLoggerBase):
    """Counts the tokens of all cores."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.engine_index = engine_index

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            totals["generated"] += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing is to be said then."""
