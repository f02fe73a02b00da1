"""The end of a process on another machine, which its owner is told once."""

from __future__ import annotations

import socket
import threading
from typing import NamedTuple

from quire.processes.child_process import GRACE_S


class Ending(NamedTuple):
    """A process's end: exit code, the same in words, and the class and text of its error."""

    code: int
    words: str
    last_words: tuple[str, str] | None


class DistantProcess:
    """The part of an `OwnedProcess` that is the same for all that run on other machines.

    `pipe` is closed at the other end once `finish` was called; the first ending counts. `lost`: the
    words of an end that nobody has told within `GRACE_S`.
    """

    is_here = False
    lost = "closed its connections, or is lost"

    def __init__(self) -> None:
        self.pipe, self._theirs = socket.socketpair()
        self._ending: Ending | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self._ending is None

    @property
    def exit_code(self) -> int | None:
        return None if self._ending is None else self._ending.code

    def exit_words(self) -> str:
        """As `OwnedProcess.exit_words`: a machine may tell later than connections do."""
        if not self._ended.wait(GRACE_S):
            self.finish(Ending(1, self.lost, None))
        assert self._ending is not None, "it was waited for"
        return self._ending.words

    def last_words(self) -> tuple[str, str] | None:
        return None if self._ending is None else self._ending.last_words

    def finish(self, ending: Ending) -> None:
        """It has ended like this, as far as its owner is concerned."""
        with self._lock:
            if self._ending is not None:
                return
            self._ending = ending
        self._ended.set()
        # which makes `pipe` readable
        self._theirs.close()
