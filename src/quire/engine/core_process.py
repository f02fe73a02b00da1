"""A core process as its front end sees it: started from a fresh interpreter, watched, ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from quire.engine.coordinator import CoordinatorMessage
from quire.engine.start_message import StartMessage, last_words, send_start

GRACE_S = 5.0
"""How long a process that was told to end may take, if nothing else is said."""

_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path.append(sys.argv[2]); from importlib import import_module; "
    "import_module(sys.argv[3]).main(int(sys.argv[1]))"
)
"""The front end's `sys.path` comes with the start message; until then ours is found here."""


class CoreProcess:
    """One life of a core process. Making it starts the interpreter; `start` tells it what to be.

    `pipe` becomes readable when the process has ended, however it ended.
    """

    def __init__(self, main: str = "quire.engine.core_main") -> None:
        """`main` is the module of the program."""
        self.pipe, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), _ROOT, main],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the front end, which ends its cores in order
            )
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()
        self._is_in_main_thread = threading.current_thread() is threading.main_thread()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, message: StartMessage | CoordinatorMessage) -> None:
        """Send the one message; a process that is gone already is found by its pipe."""
        message.dies_with_thread = self._is_in_main_thread
        try:
            send_start(self.pipe, message)
        except (BrokenPipeError, ConnectionResetError):
            return

    @property
    def is_running(self) -> bool:
        """Whether the process exists."""
        return self._process.poll() is None

    def exit_words(self, timeout_s: float = GRACE_S) -> str:
        """How the process ended, in words; waits for the end that its pipe has announced."""
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
        """How it ended; negative: by which signal. None while it runs."""
        return self._process.poll()

    def last_words(self) -> tuple[str, str] | None:
        """The class and the text of the error that kept it from serving, if that was so."""
        return last_words(self.pipe)

    def terminate(self) -> None:
        """Tell it to end, by signal."""
        if self.is_running:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        if self.is_running:
            self._process.kill()
        self._process.wait()

    def end(self, timeout_s: float) -> None:
        """Wait until it has ended by itself; kill it after `timeout_s`. Idempotent."""
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            self.kill()
        self.pipe.close()
