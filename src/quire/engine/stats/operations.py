"""Durations of control calls that operators watch: of weight updates and of sleep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import msgspec

from quire.engine.stats.buckets import Buckets
from quire.engine.wire.control_calls import Utility
from quire.observability.metrics import Gauge, Metric

BOUNDS = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
_UPDATE, _SLEEP = "rl_weight_update", "sleep_mode"
_OPERATIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "init_weight_transfer_engine": (_UPDATE, "init"),
        "shutdown_weight_transfer_engine": (_UPDATE, "shutdown"),
        "start_weight_update": (_UPDATE, "start"),
        "update_weights": (_UPDATE, "update"),
        "prepare_weight_update": (_UPDATE, "finish"),
        "sleep": (_SLEEP, "sleep"),
        "release_kv_cache_memory": (_SLEEP, "release_kv_cache_memory"),
        "wake_up": (_SLEEP, "wake"),
    }
)
"""Method of a core -> the metrics' name and the value of their label."""


class OperationNote(msgspec.Struct, frozen=True, array_like=True):
    """An operation has begun, or (with its seconds) ended."""

    metric: str
    operation: str
    seconds: float | None = None


@contextmanager
def noted(call: Utility[object], note: Callable[[OperationNote], None]) -> Iterator[None]:
    """Note the operation that a call is, if it is one, whether it fails or not."""
    found = _operation_of(call)
    if found is None:
        yield
        return
    note(OperationNote(*found))
    began = time.monotonic()
    try:
        yield
    finally:
        note(OperationNote(*found, time.monotonic() - began))


def _operation_of(call: Utility[object]) -> tuple[str, str] | None:
    if call.method == "start_weight_update" and call.args[:1] == (True,):
        return _UPDATE, "start_draft"
    return _OPERATIONS.get(call.method)


class OperationTotals:
    """The operations that were noted. A metric is there from its first use on."""

    def __init__(self) -> None:
        self._in_flight: Counter[tuple[str, str]] = Counter()
        self._durations: dict[tuple[str, str], Buckets] = {}

    def add(self, note: OperationNote) -> None:
        """Count a note."""
        key = note.metric, note.operation
        self._in_flight[key] += 1 if note.seconds is None else -1
        durations = self._durations.setdefault(key, Buckets(BOUNDS))
        if note.seconds is not None:
            durations.add(note.seconds)

    def metrics(self) -> Iterator[Metric]:
        """The totals as they are now."""
        for (metric, operation), durations in self._durations.items():
            labels = {"operation": operation}
            yield durations.histogram(f"{metric}_operation_duration_seconds", labels)
            count = self._in_flight[metric, operation]
            yield Gauge(f"{metric}_operations_in_flight", labels, count)
