"""A spare process takes a dead core's place, and nothing of it is left behind."""

import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from quire import EngineArgs, SamplingParams
from quire.engine.process import core_pool
from quire.engine.process.core_pool import CorePool
from quire.engine.wire.messages import EngineCoreRequest, EngineZmqAddresses
from tests.engine.launched import launch_sync


def plan_of(**wishes):
    return EngineArgs(
        max_num_seqs=4, num_gpu_blocks_override=100, max_model_len=128, **wishes
    ).create_engine_config()


class Process:
    def __init__(self, module):
        self.is_running, self.message = True, None

    def start(self, message, fds=()):
        self.message = message

    def end(self, timeout_s):
        self.is_running = False


@pytest.fixture
def pool_of(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(core_pool, "ChildProcess", Process)
    monkeypatch.setattr(core_pool.time, "monotonic", lambda: clock.now)

    def make(cores=1, **wishes):
        pool = CorePool(plan_of(**wishes), EngineZmqAddresses("", ""), range(cores))
        for index in range(cores):
            pool.start(index)
        return pool, clock

    return make


def test_a_spare_waits_from_the_first_death_on(pool_of):
    pool, clock = pool_of(2)
    clock.now = 10.0
    pool.keep_spares()
    assert pool.spares == []
    pool.start(1)
    pool.keep_spares()
    assert pool.spares == [], "it would compete with the core that starts"
    clock.now = 13.0
    pool.keep_spares()
    pool.keep_spares()
    [spare] = pool.spares
    assert pool.start(0) is spare
    assert spare.message.incarnation == 2
    assert pool.spares == []


def test_a_spare_that_has_died_is_replaced_and_never_used(pool_of):
    pool, clock = pool_of(spare_core="always")
    clock.now = 3.0
    pool.keep_spares()
    [spare] = pool.spares
    spare.is_running = False
    assert pool.start(0) is not spare
    clock.now = 6.0
    pool.keep_spares()
    assert len(pool.spares) == 1
    pool.end()
    assert pool.spares == []


def test_nobody_waits_where_none_is_wished(pool_of):
    pool, clock = pool_of(spare_core="never")
    pool.start(0)
    clock.now = 60.0
    pool.keep_spares()
    assert pool.spares == []


@pytest.mark.slow
def test_the_next_life_is_the_spare():
    before = set(psutil.Process().children(recursive=True))
    client = launch_sync(plan_of(spare_core="always"), max_restarts=3)
    pool = client.remote.pool
    try:
        while not pool.spares:
            client._wait(0.2)
            client._take()
        [spare] = pool.spares
        os.kill(client.core_status(0).pid, signal.SIGKILL)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        client.add_request(EngineCoreRequest(1, [5, 6, 7], params, 1, 0.0))
        ids = []
        while len(ids) < 4:
            ids += client.get_output().token_ids
        assert client.core_status(0).pid == spare.pid
        assert client.num_restarts == 1
    finally:
        client.shutdown()
    assert set(psutil.Process().children(recursive=True)) == before
