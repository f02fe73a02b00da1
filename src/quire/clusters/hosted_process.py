"""The part of a process on another machine that runs there: it starts the process and watches it.

It is the class of a Ray actor (ray_process.py), and knows nothing of Ray. When the actor ends, the
process finds its pipe closed and ends too. When the actor's own parent ends, such as the raylet of
its machine, the cluster cannot reach the actor any more, and the process is killed.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping

from quire.environment import take_environment
from quire.processes.child_process import ChildProcess
from quire.processes.distant_process import Ending

PARENT_CHECK_MS = 1000
"""Milliseconds between two looks at whether the parent of an actor lives."""


class HostedProcess:
    """A child process of this one that runs the `PROGRAM` of `module` for an owner elsewhere.

    `start` is the owner's start message, completed and encoded. `environment` are variables of the
    owner's that count here where they are not set, and `own` are fields of the message that the
    owner did not know when it was encoded.
    """

    def __init__(
        self,
        module: str,
        start: bytes,
        environment: Mapping[str, str],
        own: Mapping[str, str] = {},  # noqa: B006 (read only)
    ) -> None:
        self._parent_pid = os.getppid()
        # before the process starts, which inherits it
        take_environment(environment)
        self._process = ChildProcess(module)
        self._process.forward(start, **own)

    def wait_for_init(self) -> int:
        """The number of the process, which has been started."""
        return self._process.pid

    def run(self) -> Ending:
        """Wait until the process has ended, or the parent of this one, with which it is killed."""
        poll = select.poll()
        poll.register(self._process.pipe, select.POLLIN)
        while not poll.poll(PARENT_CHECK_MS):
            if os.getppid() != self._parent_pid:
                # Ray's own look takes a raylet for alive that is dead and has not been reaped
                self._process.kill()
        words = self._process.exit_words()
        code, last_words = self._process.exit_code, self._process.last_words()
        self._process.end(0.0)
        assert code is not None, "its end has been waited for"
        return Ending(code, words, last_words)

    def ask_to_end(self) -> None:
        self._process.ask_to_end()

    def kill(self) -> None:
        self._process.kill()
