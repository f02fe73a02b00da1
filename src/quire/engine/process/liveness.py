"""The thread of a core process that sends heartbeats, and ends the process after its front end."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from quire.engine.process.socket_folder import remove_socket_folder
from quire.processes.start_message import ORPHANED

PEERS_LOST = 4
"""The exit code of a core that ends because another core of its lock-step group has ended."""


class Vitals:
    """Calls `beat` every `period_s` until `close`, and `on_end` when the starter asks the process
    to end; the process ends when `pipe` does.

    A thread of its own, so that a long step delays nothing. `beat` and `on_end` run in it.
    """

    def __init__(
        self,
        pipe: socket.socket,
        period_s: float,
        beat: Callable[[], None],
        on_end: Callable[[], None],
        folder: str | None,
    ) -> None:
        self._pipe = pipe
        self._period_s = period_s
        self._beat = beat
        self._on_end = on_end
        self._folder = folder
        self._is_closed = False
        # held while a beat is sent: after `close` the thread does not touch its socket any more
        self._beating = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send no more heartbeats. The pipe is watched to the end."""
        with self._beating:
            self._is_closed = True

    def _run(self) -> None:
        watch = select.poll()
        watch.register(self._pipe, select.POLLIN | select.POLLHUP)
        while True:
            if watch.poll(self._period_s * 1000):
                if not self._received():
                    self._end_orphan()
                self._on_end()
            with self._beating:
                if not self._is_closed:
                    self._beat()

    def _received(self) -> bytes:
        try:
            return self._pipe.recv(64)
        except OSError:
            return b""

    def _end_orphan(self) -> None:
        """The front end has exited: remove its sockets and exit, whatever the loop is doing."""
        if self._folder is not None:
            remove_socket_folder(Path(self._folder))
        os._exit(ORPHANED)
