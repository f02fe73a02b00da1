"""A platform: Quire's own, counted. It is active where ACME_PLATFORM is set."""

import os

from quire.executor.platform import Platform, open_own_platform
from quire.executor.worker_config import WorkerConfig

opened = {"platforms": 0}


def probe() -> str | None:
    """The function that opens the platform, None where this machine does not have it."""
    return "acme_quire.platform:open_platform" if "ACME_PLATFORM" in os.environ else None


def open_platform(config: WorkerConfig) -> Platform:
    """Open the device of the workers."""
    opened["platforms"] += 1
    return open_own_platform(config)
