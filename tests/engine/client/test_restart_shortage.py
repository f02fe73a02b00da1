"""A core that cannot be restarted for want of descriptors or memory: tries that had no chance."""

import errno
import os

import pytest

from quire.engine.client.client import CoreStatus
from quire.engine.client.supervisor import PATIENCE_S, Supervisor
from quire.errors import EngineDeadError


class DeadCore:
    """A core that has died, and that the system refuses to start for `short_s`."""

    engine_indices = (0,)
    next_check_s = 0.25
    is_idle = True

    def __init__(self, code, short_s):
        self.now = 0.0
        self.starts = []
        self._code = code
        self._short_s = short_s
        self._events = [EngineDeadError("killed", engine_index=0)]

    def take(self):
        pass

    def next_output(self):
        if self._events:
            raise self._events.pop()

    def dying_step(self, engine_index):
        return ()

    def core_status(self, engine_index):
        return CoreStatus(engine_index, 1, pid=1, is_running=False, is_started=True)

    def is_dead(self, engine_index):
        return not self.starts

    def restart_core(self, engine_index, first):
        if self.now < self._short_s:
            raise OSError(self._code, os.strerror(self._code))
        self.starts.append(self.now)


def run(cores, until_s):
    supervisor = Supervisor(cores, max_restarts=3, clock=lambda: cores.now)
    while cores.now < until_s and not cores.starts:
        supervisor.take()
        supervisor.next_output()
        supervisor.next_output()
        cores.now += supervisor.next_check_s or 0.01
    return supervisor


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_shortage_is_waited_for(code):
    cores = DeadCore(code, short_s=60.0)
    supervisor = run(cores, 100.0)
    assert len(cores.starts) == 1 and cores.starts[0] < 63.0
    assert supervisor.num_restarts == 1


def test_a_shortage_that_does_not_end_is_the_engine_s_death():
    with pytest.raises(EngineDeadError, match="Too many open files"):
        run(DeadCore(errno.EMFILE, short_s=1e9), PATIENCE_S + 600.0)


def test_another_failure_counts():
    with pytest.raises(EngineDeadError, match="No such file"):
        run(DeadCore(errno.ENOENT, short_s=1e9), 60.0)
