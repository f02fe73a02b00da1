"""The enumerations that parameters use."""

from __future__ import annotations

import enum


class SamplingType(enum.IntEnum):
    """The kind of draw that a request needs."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(enum.Enum):
    """The content of each `RequestOutput`: all so far, what is new, or all but only at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2
