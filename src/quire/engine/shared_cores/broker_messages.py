"""What API servers and the process that owns their cores say to each other (broker.py)."""

from __future__ import annotations

import msgspec

from quire.engine.client.client import CoreStatus
from quire.engine.stats.step_stats import IterationStats
from quire.observability.metrics import Metric

ADD, ABORT, CALL, FIGURES, SIGN, ANSWER = (bytes([code]) for code in range(6))
"""To the hub: a request, handles to drop, an `UtilityRequest`, `ServerReport`, a `Sign` of life,
the answer to an `UtilityRequest` of the hub.
"""

OUTPUTS, REPLY, STATUS, ASK, DEAD = (bytes([code]) for code in range(16, 21))
"""To a server: a part of a step, the answer to its `UtilityRequest`, the cores' states, an
`UtilityRequest` to answer, and why the engine is dead.
"""

METRICS, SCALE, ABORT_SHOWN = "metrics", "scale", "abort_shown"
"""What a server may ask of the hub beside the utilities of cores: `MetricsNow`, (number of cores,
drain_timeout_s), and the number of requests that the other servers have ended by the names that
their clients know (None: all).
"""

FLUSH = "flush"
"""The hub asks a server to send its figures now. It asks for `ABORT_SHOWN` too."""


class ServerReport(msgspec.Struct, array_like=True, gc=False):
    """What a server has counted since it last said so: of each core, and refused requests by limit.
    `sleep_level`: the engine was put to sleep (level), or woken (-1).
    """

    by_core: list[tuple[int, IterationStats]] = []
    num_rejected: dict[str, int] = {}
    sleep_level: int | None = None


class Sign(msgspec.Struct, array_like=True, gc=False):
    """A server lives; `is_up` when it takes connections."""

    is_up: bool


class CoreStates(msgspec.Struct, array_like=True, gc=False):
    """How the cores are. `is_open`: requests may come."""

    statuses: list[CoreStatus]
    is_open: bool


class MetricsNow(msgspec.Struct, array_like=True, gc=False):
    """All metrics of the engine, with the wall-clock time from which they count."""

    since: float
    metrics: list[Metric]
