"""A child process as its starter sees it: a fresh interpreter, which is watched and ended.

It gets one message (start_message.py) through a pipe that stays open until it ends; child_main.py
is its main program. It leaves SIGTERM and SIGINT to its starter (owner_signals.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from quire.plugins import program_entries
from quire.processes.owner_signals import held_back
from quire.processes.start_message import (
    ChildStart,
    M,
    last_words,
    relocated,
    send_frame,
    send_start,
)

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})

GRACE_S = 5.0
"""Seconds that a process may take that was told to end, if nothing else is said."""

_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path.append(sys.argv[3]); "
    "from quire.processes.child_main import main; "
    "main(int(sys.argv[1]), sys.argv[2], int(sys.argv[4]))"
)
"""`sys.path` comes with the start message; until then the last argument finds the package."""


def is_shortage(error: BaseException) -> bool:
    """Whether a start failed for want of descriptors, memory or ids, which may come back."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def completed(message: M) -> M:
    """A start message with what every process must know."""
    message.sys_path = [os.path.abspath(entry) for entry in sys.path]
    message.entries = program_entries()
    message.log_level = logging.getLogger("quire").getEffectiveLevel()
    return message


class ChildProcess:
    """Starts an interpreter that runs the `PROGRAM` of `module` once `start` has sent its message.

    `pipe` becomes readable when the process has ended, however it ended. `fds` are inherited under
    their numbers.
    """

    def __init__(self, module: str, fds: Sequence[int] = ()) -> None:
        self.pipe, theirs = socket.socketpair()
        is_in_main_thread = threading.current_thread() is threading.main_thread()
        # the system's signal comes when the starting thread ends, which may be long before its
        # process does
        parent_pid = str(os.getpid() if is_in_main_thread else 0)
        # -P: modules are not looked for in the folder that the program runs in
        words = ["-P", "-c", _BOOT, str(theirs.fileno()), module, _ROOT, parent_pid]
        try:
            # Ctrl-C right after the start would leave a process that nobody knows
            with held_back():
                self._process = subprocess.Popen(
                    [sys.executable, *words],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *fds],
                    process_group=0,  # Ctrl-C is for the starter
                )
        except BaseException:
            self.pipe.close()
            raise
        finally:
            # the child has its own: with this one open its end would not show in the pipe
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_here(self) -> bool:
        return True

    def start(self, message: ChildStart, fds: Sequence[int] = ()) -> None:
        """Send the message, completed with what every process must know, and descriptors. The pipe
        reports a process that has ended already.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_start(self.pipe, completed(message), fds)

    def forward(self, start: bytes, **own: str) -> None:
        """Send a message that its starter on another machine has completed and encoded, with fields
        that this machine knows better. Modules are found as here first.
        """
        here = [os.path.abspath(entry) for entry in sys.path]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_frame(self.pipe, relocated(start, here, own))

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def exit_words(self, timeout_s: float = GRACE_S) -> str:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its pipe and had to be killed"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def last_words(self) -> tuple[str, str] | None:
        return last_words(self.pipe)

    def ask_to_end(self) -> None:
        """Send it the word to end, which only cores that are ready take (liveness.py)."""
        with contextlib.suppress(OSError):
            self.pipe.send(b"\0")

    def kill(self) -> None:
        if self.is_running:
            self._process.kill()
        self._process.wait()

    def end(self, timeout_s: float) -> None:
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            self.kill()
        self.pipe.close()
