"""Ranks that are reached over a network give the bits of one, and a request that fails on one of
them ends alone.

The ranks are threads here that know nothing of each other's memory: they are told to be on hosts of
their own, so that gloo connects them.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from contextlib import suppress

import pytest

from quire.distributed import meeting
from quire.distributed.mesh import Mesh
from quire.engine.core.builder import build_core, core_over
from quire.engine.core.worker_program import worker_config
from quire.engine.wire.output_parts import FinishReason
from quire.errors import EngineDeadError, LoadError
from quire.executor.ranks.multiproc import MultiprocExecutor
from quire.executor.ranks.network_ranks import NetworkRanks
from quire.executor.ranks.rank_main import BEAT_S, serve_rank
from quire.executor.ranks.wiring import open_signs
from quire.executor.worker_extension import worker_class
from quire.hardware.native import find_native
from quire.processes.child_process import ChildProcess
from quire.testing import make_checkpoint
from tests.executor.ranks.test_multiproc import EXTENSION, SHAPE, answer_of_one
from tests.executor.worker_cores import plan_of, requests, same_bits, serve

pytestmark = pytest.mark.skipif(find_native()[0] is None, reason="ranks have native kernels")
FOUR = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def beat(signs, ended):
    with suppress(EngineDeadError):
        while not ended.wait(BEAT_S):
            signs.beat()


class ThreadOfRank:
    """A rank's process that is a thread of this one."""

    is_here = True

    def __init__(self, rank, config):
        self.pid, self._rank, self._config = os.getpid(), rank, config
        self.pipe, self._end = socket.socketpair()

    def start(self, message):
        self._thread = threading.Thread(target=self._run, args=(message,), name=f"{self._rank}")
        self._thread.start()

    def _run(self, message):
        signs = open_signs(message)
        ended = threading.Event()
        beating = threading.Thread(target=beat, args=(signs, ended))
        beating.start()
        with self._end, signs.connection:
            try:
                serve_rank(message, self._config, signs, lambda: None)
            finally:
                ended.set()
                beating.join()

    def end(self, timeout_s):
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.pipe.close()

    def last_words(self):
        return None

    def kill(self):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPE, "llama", dtype="float32")


def core_of(plan, start_process, mesh):
    ranks = NetworkRanks(start_process, plan, mesh, ())
    kind = worker_class(plan.parallel)
    return core_over(plan, MultiprocExecutor(ranks, kind))


@pytest.fixture
def distant(monkeypatch):
    """Hosts of their own for threads."""
    monkeypatch.setattr(meeting, "host_id", lambda: threading.current_thread().name.encode())


def test_ranks_of_several_hosts_have_the_bits_of_one_and_fail_alone(folder, distant):
    plan = plan_of(folder, worker_extension_cls=EXTENSION, **FOUR)
    config = worker_config(plan)
    core = core_of(plan, lambda rank: ThreadOfRank(rank, config), Mesh(2, 2))
    right = answer_of_one(folder, list(requests(5)))
    assert same_bits(serve(core, list(requests(5))), right)
    core.executor.collective_rpc("fail_with", (1, 299), {})
    given = list(requests(5))
    given[2].prompt_token_ids = [299, 299, *given[2].prompt_token_ids]
    found = serve(core, given)
    core.executor.collective_rpc("fail_with", (1, None), {})
    assert found.ends[2].reason is FinishReason.ERROR
    others = [handle for handle in right.tokens if handle != 2]
    assert {h: found.tokens[h] for h in others} == {h: right.tokens[h] for h in others}
    assert same_bits(serve(core, list(requests(5))), right)
    core.shutdown()


def test_ranks_save_their_parts_and_read_nothing_else(folder, tmp_path, distant):
    plan = plan_of(folder, **FOUR)
    config = worker_config(plan)
    core = core_of(plan, lambda rank: ThreadOfRank(rank, config), Mesh(2, 2))
    right = serve(core, list(requests(4)))
    core.executor.collective_rpc("save_sharded_state", (str(tmp_path),), {"max_size": 100_000})
    core.shutdown()
    names = {file.name.partition("-part-")[0] for file in tmp_path.glob("*.safetensors")}
    assert names == {f"model-pp-{pp}-tp-{tp}" for pp in (0, 1) for tp in (0, 1)}
    for file in folder.glob("*.json"):
        shutil.copy(file, tmp_path)
    plan = plan_of(tmp_path, load_format="sharded_state", **FOUR)
    config = worker_config(plan)
    core = core_of(plan, lambda rank: ThreadOfRank(rank, config), Mesh(2, 2))
    assert same_bits(serve(core, list(requests(4))), right)
    core.shutdown()
    with pytest.raises(LoadError, match="give .*pipeline_parallel_size=2"):
        build_core(plan_of(tmp_path, load_format="sharded_state"))


@pytest.mark.parametrize(
    ("said", "why"),
    [(None, "QuireWorker-1 exited with code 1"), (("LoadError", "no such model"), "no such model")],
)
def test_a_rank_that_ends_before_it_connects_is_noticed_at_once(folder, said, why):
    class Ended:
        def __init__(self, rank):
            self.pipe, self._other = socket.socketpair()
            if rank == 1:
                self._other.close()

        def start(self, message):
            pass

        def exit_words(self):
            return "exited with code 1"

        def last_words(self):
            return said

        def kill(self):
            pass

        def end(self, timeout_s):
            self.pipe.close()
            self._other.close()

    began = time.monotonic()
    with pytest.raises(LoadError, match=why):
        NetworkRanks(Ended, plan_of(folder, **FOUR), Mesh(2, 2), ())
    assert time.monotonic() - began < 10


@pytest.mark.full
def test_processes_of_one_host_find_out_that_they_share_memory(folder):
    plan = plan_of(folder, **FOUR)
    program = worker_config(plan).program
    core = core_of(plan, lambda rank: ChildProcess(program), Mesh(2, 2))
    assert same_bits(serve(core, list(requests(5))), answer_of_one(folder, list(requests(5))))
    core.shutdown()
