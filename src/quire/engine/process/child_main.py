"""How a process of ours begins: the inside of what child_process.py starts."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable

from quire.engine.process.liveness import ORPHANED, die_with_parent, name_process
from quire.engine.process.start_message import M, receive_start

LOG_FORMAT = "({} pid=%(process)d) %(levelname)s %(name)s: %(message)s"
"""Of a process with this title."""


def take_pipe(pipe_fd: int) -> socket.socket:
    """The pipe to the starter, which from here on is the one that answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = socket.socket(fileno=pipe_fd)
    pipe.set_inheritable(False)
    return pipe


def begin(
    pipe: socket.socket, kind: type[M], title: Callable[[M], str], log_format: str = LOG_FORMAT
) -> M:
    """Wait for the start message and take on what it says of the process: its imports, its name,
    its log. Ends the process when the starter is gone.
    """
    try:
        start = receive_start(pipe, kind)
    except (EOFError, ConnectionResetError):
        sys.exit(ORPHANED)
    if start.dies_with_thread:
        die_with_parent(start.parent_pid)
    sys.path[:] = start.sys_path
    name_process(title(start))
    logging.basicConfig(level=start.log_level, format=log_format.format(title(start)))
    return start
