"""Durations of control calls that operators watch: of weight updates and of sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import msgspec

from quire.engine.wire.control_calls import Utility

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
