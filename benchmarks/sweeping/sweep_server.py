"""The server of a sweep: started for one set of parameters, and gone when that is done."""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire.errors import EngineError

_LOOK_S = 0.2
_END_S = 60.0
_LAST_LINES = 3


class CommandFailed(EngineError):
    """A command of the sweep did not do what it was for; the text says where its log is."""


@contextmanager
def running_server(
    command: Sequence[str], url: str, log: Path, *, ready_s: float, shows: bool
) -> Iterator[None]:
    """`command` as a process that answers at `url`/health, for a block.

    Raises CommandFailed if it ends or does not answer within `ready_s`. It is asked to end, and
    killed with all that it started if it does not.
    """
    if _answers(url):
        raise CommandFailed(f"Another server answers at {url} already.")
    with log.open("wb") as file:
        target = None if shows else file
        process = start(command, target)
        try:
            _wait(process, url, log, ready_s)
            yield
        finally:
            end(process)


def start(command: Sequence[str], output: int | object | None) -> subprocess.Popen[bytes]:
    """The command in a process group of its own, so that Ctrl-C is the sweep's."""
    errors = None if output is None else subprocess.STDOUT
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,  # type: ignore[arg-type]
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandFailed(f"{shlex.join(command)}: {error.strerror}") from None


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end; kill it and its children if it takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_lines(log: Path) -> str:
    """The end of a log, on one line, with its place."""
    text = log.read_text(errors="replace") if log.exists() else ""
    shown = " | ".join(text.strip().splitlines()[-_LAST_LINES:])
    return f"{log}: {shown}" if shown else str(log)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    while not _answers(url):
        if process.poll() is not None:
            text = f"The server ended with code {process.returncode}; {last_lines(log)}"
            raise CommandFailed(text)
        if time.monotonic() > deadline:
            raise CommandFailed(f"No answer from {url} in {ready_s:g} s; {last_lines(log)}")
        time.sleep(_LOOK_S)


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False
