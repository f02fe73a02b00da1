"""The main program of every child process (child_process.py): a core, an API server, the
coordinator.

What differs between them is a `ChildProgram`, which the module of each kind has as `PROGRAM`.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NoReturn

from quire.hardware.prepared_memory import prepare
from quire.plugins import load_general_plugins, register_all
from quire.processes.owner_signals import leave_to_owner
from quire.processes.start_message import (
    ORPHANED,
    M,
    decode_start,
    preparation_in,
    receive_start,
)
from quire.start_up import quick_imports

LOG_FORMAT = "({} pid=%(process)d) %(levelname)s %(name)s: %(message)s"
SERVER_LOG_FORMAT = "%(asctime)s ({}) %(levelname)s %(name)s: %(message)s"

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True, slots=True)
class ChildProgram(Generic[M]):
    """The program of a kind of child process: `run` gets the start message, of the struct `start`,
    and the pipe to the starter, and returns the exit code. `title` names the process in the log,
    whose format has a place for it, and in the list of processes.
    """

    start: type[M]
    title: Callable[[M], str]
    run: Callable[[M, socket.socket], int]
    log_format: str = LOG_FORMAT


def main(pipe_fd: int, module: str, parent_pid: int) -> NoReturn:
    """Import the program of `module`, while the starter may still decide what to start, wait for
    the start message, and run.

    `parent_pid`: the starter, if the system may kill this process when the thread that started it
    ends; else 0.
    """
    leave_to_owner()
    if parent_pid:
        _die_with_parent(parent_pid)
    pipe = socket.socket(fileno=pipe_fd)
    # a process that this one starts would keep the pipe open after its end
    pipe.set_inheritable(False)
    received: Future[tuple[bytearray, list[int]]] = Future()
    # beside the imports: the settings say what can be prepared meanwhile
    threading.Thread(target=_receive, args=(pipe, received), daemon=True).start()
    with quick_imports(lasting=True):
        program: ChildProgram[Any] = importlib.import_module(module).PROGRAM
    try:
        data, fds = received.result()
        start = decode_start(data, program.start, fds)
    except (EOFError, ConnectionResetError):
        sys.exit(ORPHANED)
    sys.path[:] = start.sys_path
    title = program.title(start)
    _name_process(title)
    logging.basicConfig(level=start.log_level, format=program.log_format.format(title))
    load_general_plugins()
    register_all(start.entries)
    sys.exit(program.run(start, pipe))


def _receive(pipe: socket.socket, received: Future[tuple[bytearray, list[int]]]) -> None:
    """Wait for the start message, and begin what can be done while the program is imported."""
    try:
        data, fds = receive_start(pipe)
        prepare(preparation_in(data))
        received.set_result((data, fds))
    except Exception as error:
        received.set_exception(error)


def _die_with_parent(parent_pid: int) -> None:
    """Have the system kill this process when the thread that started it ends (Linux; elsewhere the
    end of the pipe is the only sign).
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(ORPHANED)


def _name_process(name: str) -> None:
    """Show `name` (at most 15 bytes count) in the list of processes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
