"""Totals of drafts, in the metrics and in the log."""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine.wire.messages import SchedulerStats, SpecDecodingStats
from quire.observability.metrics import Counter, Metric, Vector


class DraftTotals:
    """Sums of the drafts of steps; without any, there are no metrics and no words."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_accepted: list[int] = []

    def add(self, stats: SchedulerStats) -> None:
        """Count the drafts since the last stats."""
        self._num_tokens += stats.num_draft_tokens
        missing = len(stats.num_accepted) - len(self._num_accepted)
        self._num_accepted += [0] * missing
        for place, count in enumerate(stats.num_accepted):
            self._num_accepted[place] += count

    def take(self) -> SpecDecodingStats | None:
        """Return the sums and begin anew; None without drafts."""
        found = self._sums()
        self._num_tokens, self._num_accepted = 0, []
        return found

    def metrics(self, labels: dict[str, str]) -> Iterator[Metric]:
        sums = self._sums()
        if sums is None:
            return
        yield Counter("spec_decode_num_drafts", labels, sums.num_drafts)
        yield Counter("spec_decode_num_draft_tokens", labels, sums.num_draft_tokens)
        yield Counter("spec_decode_num_accepted_tokens", labels, sums.num_accepted_tokens)
        by_place = sums.num_accepted_tokens_per_pos
        yield Vector("spec_decode_num_accepted_tokens_per_pos", labels, by_place)

    def _sums(self) -> SpecDecodingStats | None:
        if not self._num_tokens:
            return None
        return SpecDecodingStats.of(self._num_tokens, self._num_accepted)


def in_words(stats: SpecDecodingStats, seconds: float) -> str:
    """A line for the log about the drafts of some seconds."""
    rates = (count / stats.num_drafts for count in stats.num_accepted_tokens_per_pos)
    return (
        f"mean acceptance length {1 + stats.num_accepted_tokens / stats.num_drafts:.2f}, "
        f"accepted {stats.num_accepted_tokens / seconds:.1f} tokens/s, "
        f"drafted {stats.num_draft_tokens / seconds:.1f} tokens/s, "
        f"accepted {stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens "
        f"({100 * stats.num_accepted_tokens / stats.num_draft_tokens:.1f} %), "
        f"by position {', '.join(f'{rate:.2f}' for rate in rates)}"
    )
