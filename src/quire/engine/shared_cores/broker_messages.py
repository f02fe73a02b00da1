"""The messages between API servers and the process that owns their cores (broker.py).

Requests, aborts, calls and outputs are those between a front end and a core (wire/messages.py); a
call may go either way. What follows is about API servers alone.
"""

from __future__ import annotations

import msgspec

from quire.engine.client.client import CoreStatus
from quire.engine.stats.operations import OperationNote
from quire.engine.stats.step_stats import IterationStats
from quire.engine.wire.messages import EngineCoreRequestType
from quire.observability.metrics import Metric

ADD = EngineCoreRequestType.ADD.value
ABORT = EngineCoreRequestType.ABORT.value
UTILITY = EngineCoreRequestType.UTILITY.value

REPORT, ANSWER = bytes([16]), bytes([17])
"""Kinds of messages to the broker: a `ServerReport`, the `UtilityOutput` of its call."""

OUTPUTS, STATUS, DEAD = (bytes([code]) for code in range(32, 35))
"""Kinds of messages to a server: `EngineCoreOutputs` with its part of a step or the answer to its
call, `CoreStates`, the text of the error when the engine is dead.
"""

METRICS, SCALE, IS_SCALING = "metrics", "scale", "is_scaling"
ABORT_SHOWN = "abort_shown"
"""Methods of the broker, besides the utilities of cores. They return `MetricsNow`, nothing
(arguments: number of cores, drain_timeout_s), whether that goes on, and the number of requests that
the other servers have ended by the ids that their clients know (None: all).
"""

FLUSH, SHUTDOWN = "flush", "shutdown"
"""Methods of a server: send a report now, stop (a second call: at once). It has `ABORT_SHOWN`, too.
"""


class ServerReport(msgspec.Struct, array_like=True, gc=False):
    """A server's heartbeat, with what it has counted since its last report: by core, and refused
    requests by limit. `sleep_level`: the engine was put to sleep (level), or woken (-1). `is_up`:
    it takes connections. `media`: queries and hits of its cache of processed media, if it has one.
    `operations`: control calls that have begun or ended.
    """

    by_core: list[tuple[int, IterationStats]] = []
    num_rejected: dict[str, int] = {}
    sleep_level: int | None = None
    is_up: bool = False
    media: tuple[int, int] | None = None
    operations: list[OperationNote] = []


class CoreStates(msgspec.Struct, array_like=True, gc=False):
    """The status of each core. `is_open`: requests may be sent."""

    statuses: list[CoreStatus]
    is_open: bool


class MetricsNow(msgspec.Struct, array_like=True, gc=False):
    """All metrics of the engine, with the wall-clock time from which they count."""

    since: float
    metrics: list[Metric]
