"""The main program of a core process.

The heavy imports come first, while the front end still decides what to start; then the one message
that says what this core is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from quire.engine.event_loop import freeze_start_up
from quire.engine.process.child_main import begin, take_pipe
from quire.engine.process.liveness import PEERS_LOST
from quire.engine.process.start_message import StartMessage, send_last_words
from quire.errors import EngineError, PeersLost

if TYPE_CHECKING:
    from quire.engine.process.core_start import Builder


def main(pipe_fd: int) -> None:
    """Serve until the front end says stop or is gone; ends the process."""
    run(pipe_fd, _builder)


def _builder() -> Builder:
    from quire.engine.core import builder  # a second, in which the front end decides

    return builder.build_core


def run(pipe_fd: int, load: Callable[[], Builder]) -> NoReturn:
    """The same for a core that is built by what `load` gives after its imports."""
    pipe = take_pipe(pipe_fd)
    build = load()
    from quire.engine.process import core_start

    message = begin(pipe, StartMessage, title)
    try:
        proc = core_start.make_core_proc(message, pipe, build)
    except Exception as error:
        send_last_words(pipe, error)
        if isinstance(error, PeersLost):
            sys.exit(PEERS_LOST)
        if isinstance(error, EngineError):  # its text says all, and the front end shows it
            sys.exit(1)
        raise
    freeze_start_up()
    sys.exit(proc.run())


def title(message: StartMessage) -> str:
    """What the core is called in logs and in the list of processes."""
    several = message.data_parallel_size > 1 or message.engine_index > 0
    return f"EngineCore_DP{message.engine_index}" if several else "EngineCore"
