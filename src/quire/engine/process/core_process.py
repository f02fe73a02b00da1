"""A core process as its front end sees it."""

from __future__ import annotations

from quire.engine.process.child_process import GRACE_S, ChildProcess

__all__ = ["GRACE_S", "CoreProcess"]


class CoreProcess(ChildProcess):
    """One life of a core process."""

    def __init__(self, main: str = "quire.engine.process.core_main") -> None:
        """`main` is the module of the program."""
        super().__init__(main)
