"""A platform: Quire's own with a line in the log. It is active where ACME_PLATFORM is set."""

import logging
import os

from quire.executor.platform import Platform, open_own_platform
from quire.executor.worker_config import WorkerConfig

logger = logging.getLogger(__name__)


def probe() -> str | None:
    """The function that opens the platform, None where this machine does not have it."""
    return "acme_quire.platform:open_platform" if "ACME_PLATFORM" in os.environ else None


def open_platform(config: WorkerConfig) -> Platform:
    """Open the device of the workers."""
    platform = open_own_platform(config)
    logger.warning("Acme's platform runs %d decodes at once.", config.steps.max_num_seqs)
    return platform
