"""A process as its owner sees it, wherever it runs."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from quire.processes.start_message import ChildStart


class OwnedProcess(Protocol):
    """A process on this machine (child_process.py), or on another one."""

    @property
    def pipe(self) -> socket.socket:
        """Readable when the process has ended, however it ended."""
        ...

    @property
    def pid(self) -> int:
        """The number of the process on its machine; 0 while that is not known."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine, so that `pid` says something here."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether the process exists."""
        ...

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; negative: the signal that ended it. None while it runs."""
        ...

    def start(self, message: ChildStart, fds: Sequence[int] = ()) -> None:
        """Send the message, completed with what every process must know, and descriptors, which a
        process on another machine cannot have.
        """
        ...

    def exit_words(self) -> str:
        """The end of the process in words; waits for the end that its pipe has announced."""
        ...

    def last_words(self) -> tuple[str, str] | None:
        """The class and the text of the error that kept it from serving, if that was so."""
        ...

    def ask_to_end(self) -> None:
        """Send it the word to end."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def end(self, timeout_s: float) -> None:
        """Wait until it has ended by itself; kill it after `timeout_s`. Idempotent."""
        ...
