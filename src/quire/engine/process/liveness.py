"""The thread of a core process that says that it lives, and that ends it when its front end has
gone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from quire.engine.process.socket_folder import remove_socket_folder

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

ORPHANED = 3
"""The exit code of a core whose front end has gone."""
PEERS_LOST = 4
"""The exit code of a core that ends since another one has with which it steps together."""


class Vitals:
    """Calls `beat` every `period_s` until `close`; the process ends when `pipe` does.

    A thread of its own, so that a long step delays neither. `beat` runs in it.
    """

    def __init__(
        self, pipe: socket.socket, period_s: float, beat: Callable[[], None], folder: str | None
    ) -> None:
        self._pipe = pipe
        self._period_s = period_s
        self._beat = beat
        self._folder = folder
        self._is_closed = False
        self._beating = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """No more signs of life; `beat` does not run any more. The pipe is watched to the end."""
        with self._beating:
            self._is_closed = True

    def _run(self) -> None:
        watch = select.poll()
        watch.register(self._pipe, select.POLLIN | select.POLLHUP)
        while True:
            if watch.poll(self._period_s * 1000):
                self._end_orphan()
            with self._beating:
                if not self._is_closed:
                    self._beat()

    def _end_orphan(self) -> None:
        """Nobody is left to answer to: take the sockets along and go, whatever the loop does."""
        if self._folder is not None:
            remove_socket_folder(Path(self._folder))
        os._exit(ORPHANED)


def die_with_parent(parent_pid: int) -> None:
    """Have the system kill this process when the thread that started it ends (Linux; elsewhere the
    pipe alone tells).
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(ORPHANED)


def name_process(name: str) -> None:
    """Show `name` (at most 15 bytes count) in the list of processes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
