"""An extension of the workers (worker_extension_cls), with which a program asks what plugins did
there: `collective_rpc("acme_report")`.
"""

from typing import Any


class WorkerReport:
    """Methods that every worker gets."""

    rank: int

    def acme_report(self) -> dict[str, Any]:
        """What the other parts of this package have done in this worker's process."""
        from acme_quire import loading, ops, platform

        return {
            "rank": self.rank,
            "norms": ops.calls["norm"],
            "platforms_opened": platform.opened["platforms"],
            "files_read": loading.read["files"],
        }
