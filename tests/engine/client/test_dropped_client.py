"""A client that nobody has any more ends its cores at once, not at the next garbage collection."""

import gc
import socket
from types import SimpleNamespace

import pytest

from quire.engine.client.core_sockets import CoreSockets
from quire.engine.client.multiprocess import SyncMPClient
from quire.engine.client.remote_cores import RemoteCores
from quire.errors import EngineDeadError


class Pool:
    """Starts no processes, and notes when those of a client are to end."""

    is_lock_step = False

    def __init__(self):
        self.incarnations = {0: 0}
        self.process = None
        self.num_ended = 0
        self._pipes = []

    def start(self, engine_index):
        self.incarnations[engine_index] += 1
        pair = socket.socketpair()
        self._pipes += pair
        self.process = SimpleNamespace(pipe=pair[0], pid=1, is_running=True, is_here=False)
        return self.process

    def death_of(self, engine_index, why):
        return EngineDeadError("gone", engine_index=engine_index)

    def keep_spares(self):
        pass

    def end(self, timeout_s):
        self.num_ended += 1
        for pipe in self._pipes:
            pipe.close()


@pytest.fixture
def without_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collection")
def test_cores_end_with_their_client_after_a_restart(tmp_path):
    pool = Pool()
    ends = [f"ipc://{tmp_path}/{name}" for name in ("to", "from")]
    client = SyncMPClient(RemoteCores(CoreSockets(*ends), pool), max_restarts=3)
    client.remote.start_core(0)
    client.remote.sockets.connections[0].ready = SimpleNamespace(pid=1)
    pool.process.is_running = False
    client.remote.check_health()
    assert client.get_output().handles == []
    assert client.num_restarts == 1 and pool.process.is_running
    assert pool.num_ended == 0
    del client
    assert pool.num_ended == 1
