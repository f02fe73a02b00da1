"""The log of commands that serve."""

from __future__ import annotations

import logging
import sys


def start_logging(level: str) -> None:
    """Log to standard error from `level` on."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # its lines say in other words what the server's own say
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
