"""A core's ranks on other machines (here: threads, over TCP): who may join, and who ends whom.

`python -m benchmarks.machines --only ranks` has real machines, as far as network namespaces are.
"""

import random
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import msgspec
import pytest

from quire import EngineArgs
from quire.encodable import to_msgpack
from quire.engine.core.worker_program import worker_config
from quire.engine.data_parallel.coordinator import CoordinatorMessage
from quire.errors import EngineError, InvalidParameter, NotBuiltYet
from quire.executor.machines import node_ranks, rank_host, ray_ranks
from quire.executor.machines.node_messages import StartRank
from quire.executor.machines.node_ranks import OtherMachines
from quire.executor.machines.rank_host import RankHost
from quire.executor.worker import Worker
from quire.processes.cluster_keys import cluster_keys
from quire.processes.listening import address_here
from quire.processes.start_message import relocated

KEYS = cluster_keys("a shared secret of 32 characters")
PROGRAM = "quire.engine.data_parallel.coordinator"
"""A program that is not a rank's, which ends at once or never, as its addresses are."""


@pytest.fixture
def port():
    while True:
        with socket.socket() as probe, suppress(OSError):
            number = random.SystemRandom().randrange(20_000, 32_000)
            probe.bind(("127.0.0.1", number))
            return number


@contextmanager
def core(port, nnodes=2):
    found = OtherMachines("127.0.0.1", port, KEYS, nnodes)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def machine(port, node_rank=1, nnodes=2, keys=KEYS, patience_s=30.0):
    """A machine that serves; gives the list of what becomes of it."""
    stop, stopping = socket.socketpair()
    host, ends = RankHost(f"tcp://127.0.0.1:{port}", keys.public, node_rank, nnodes), []

    def run():
        try:
            ends.append(host.run(stop, patience_s))
        except Exception as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ends
    finally:
        with suppress(OSError):
            stopping.send(b"\0")
        thread.join(30)
        stop.close()
        stopping.close()
        assert not thread.is_alive()


def ended(process, timeout_s=30):
    process.pipe.settimeout(timeout_s)
    assert process.pipe.recv(1) == b""
    words = process.exit_words()
    process.end(0.0)
    return words


def wait_for_end(ends, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not ends and time.monotonic() < deadline:
        time.sleep(0.05)


def message(folder):
    addresses = {name: f"ipc://{folder}/{name}" for name in ("cores_in", "cores_out", "counts_out")}
    return CoordinatorMessage(**addresses, num_cores=1)


def test_a_rank_elsewhere_ends_and_its_core_is_told_how(port):
    with core(port) as machines:
        process = machines.process(1, 0, PROGRAM)
        process.start(message("/nowhere"))  # before its machine is there
        with machine(port) as ends:
            assert ended(process) == "exited with code 1"
        assert ends == [0]


@pytest.mark.parametrize("address", ["192.0.2.1", "a-name", "127.0.0.1"])
def test_an_address_that_the_first_machine_cannot_have_is_named(port, address):
    refused = pytest.raises(InvalidParameter, match="master_addr.*cannot listen there")
    with socket.create_server(("127.0.0.1", port)), refused:
        OtherMachines(address, port, KEYS, 2)


def test_a_rank_elsewhere_is_killed(port, tmp_path):
    with core(port) as machines, machine(port):
        process = machines.process(1, 0, PROGRAM)
        process.start(message(tmp_path))
        time.sleep(0.5)
        assert process.is_running
        process.kill()
        assert ended(process) == "was killed by SIGKILL"


def test_a_machine_that_is_silent_or_was_started_again_has_lost_its_ranks(
    port, tmp_path, monkeypatch
):
    monkeypatch.setattr(node_ranks, "SILENT_S", 1.0)
    with core(port) as machines:
        with machine(port):
            lost = machines.process(1, 0, PROGRAM)
            lost.start(message(tmp_path))
            time.sleep(0.3)
        assert "gave no sign of life" in ended(lost)
        with machine(port):
            again = machines.process(1, 0, PROGRAM)
            again.start(message(tmp_path))
            time.sleep(0.3)
            assert again.is_running
            again.end(0.0)


def test_a_machine_serves_the_next_life_of_its_core(port, tmp_path):
    with machine(port) as ends:
        for _ in range(2):
            with core(port) as machines:
                process = machines.process(1, 0, PROGRAM)
                process.start(message("/nowhere"))
                assert ended(process) == "exited with code 1"
    assert ends == [0]


def test_a_machine_ends_when_its_core_does_not_come_back(port, monkeypatch):
    monkeypatch.setattr(rank_host, "FAREWELL_S", 1.0)
    with machine(port) as ends:
        with core(port):
            time.sleep(1.0)
        wait_for_end(ends)
        assert ends == [0]


@pytest.mark.parametrize("secret", ["another secret of 32 characters", None])
def test_who_finds_no_core_or_does_not_know_the_secret_says_so(port, secret):
    with core(port + 1 if secret is None else port):
        keys = cluster_keys(secret or "a shared secret of 32 characters")
        with machine(port, keys=keys, patience_s=1.0) as ends:
            wait_for_end(ends)
            assert isinstance(ends[0], TimeoutError)
            assert "QUIRE_CLUSTER_SECRET" in str(ends[0])


@pytest.mark.parametrize(("node_rank", "nnodes"), [(2, 2), (0, 2), (1, 3)])
def test_a_machine_that_is_not_expected_is_refused(port, node_rank, nnodes):
    with core(port), machine(port, node_rank, nnodes) as ends:
        wait_for_end(ends)
        assert isinstance(ends[0], EngineError)
        assert "machines 1 to 1 of 2 are expected" in str(ends[0])


def test_the_second_machine_with_a_number_is_refused_and_the_first_serves_on(
    port, tmp_path, monkeypatch
):
    # longer than a busy machine needs between two signs
    monkeypatch.setattr(node_ranks, "RIVAL_S", 2.5)
    with core(port) as machines, machine(port):
        process = machines.process(1, 0, PROGRAM)
        process.start(message(tmp_path))
        end = time.monotonic() + 20
        while not machines._lives and time.monotonic() < end:
            time.sleep(0.01)
        with machine(port) as ends:
            wait_for_end(ends)
        assert isinstance(ends[0], EngineError)
        assert "machine 1 is there already" in str(ends[0])
        assert process.is_running
        process.end(0.0)


def test_the_machine_knows_the_cpus_of_its_ranks(port, monkeypatch):
    sent = []
    monkeypatch.setattr(rank_host, "ChildProcess", lambda program: Sent(sent))
    host = RankHost(f"tcp://127.0.0.1:{port}", KEYS.public, 1, 2, ("0-3", "4-7"))
    for rank in (2, 3):
        host._take(to_msgpack(StartRank(rank, PROGRAM, b"")))
    stop, stopping = socket.socketpair()
    with stop, stopping:
        stopping.send(b"\0")
        assert host.run(stop) == 0
    assert sent == ["0-3", "4-7"]
    start = to_msgpack({"sys_path": ["/there"], "cpus": "1", "rank": 2})
    found = msgspec.msgpack.decode(relocated(start, ["/here"], {"cpus": "4-7"}))
    assert found == {"sys_path": ["/here", "/there"], "cpus": "4-7", "rank": 2}


class Sent:
    """A process; notes the CPUs that it is told."""

    is_running = True

    def __init__(self, sent):
        self.pipe, self._other = socket.socketpair()
        self._sent = sent

    def forward(self, start, cpus):
        self._sent.append(cpus)

    def end(self, timeout_s):
        self.pipe.close()
        self._other.close()


@pytest.mark.parametrize("opened", ["node_ranks", "ray_ranks"])
def test_workers_elsewhere_have_the_methods_of_their_class(monkeypatch, opened):
    module = {"node_ranks": node_ranks, "ray_ranks": ray_ranks}[opened]
    kinds = []
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "a shared secret of 32 characters")
    for name in ("OtherMachines", "NodeRanks", "WorkersGroup", "RayRanks"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *args, **named: None)
    for name in ("MultiprocExecutor", "RayExecutor"):
        monkeypatch.setattr(
            module, name, lambda ranks, kind, **named: kinds.append(kind), raising=False
        )
    monkeypatch.setitem(sys.modules, "quire.clusters.ray_process", SimpleNamespace(
        BundleOf=None, RayProcess=None
    ))  # fmt: skip
    args = EngineArgs(
        tensor_parallel_size=2,
        worker_cls=f"{__name__}:OwnWorker",
        **({"nnodes": 2} if opened == "node_ranks" else {"distributed_executor_backend": "ray"}),
    )
    config = worker_config(args.create_engine_config())
    (node_ranks.open_ranks if opened == "node_ranks" else ray_ranks.open_ray)(config)
    assert kinds == [OwnWorker]


class OwnWorker(Worker):
    """A class of the user's."""


# the plan


def test_the_first_machine_and_the_others_plan_their_part():
    wishes = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "10.0.0.1", "cpu_threads": 2}
    first = EngineArgs(**wishes).create_engine_config().parallel
    other = EngineArgs(**wishes, node_rank=1).create_engine_config(headless=True).parallel
    assert (first.nnodes, first.node_rank, other.node_rank) == (2, 0, 1)
    assert (first.master_addr, first.master_port) == ("10.0.0.1", 29501)
    assert first.num_threads == other.num_threads == 2, "one of the ranks is here"
    assert first.distributed_executor_backend == "mp"


@pytest.mark.parametrize(
    ("wishes", "headless", "name"),
    [
        ({"nnodes": 2}, False, "nnodes"),
        ({"nnodes": 3, "tensor_parallel_size": 2}, False, "nnodes"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, True, "node_rank"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, False, "node_rank"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, True, "node_rank"),
        ({"node_rank": 1}, True, "node_rank"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            False,
            "nnodes",
        ),
    ],
)
def test_machines_that_cannot_be_are_refused(wishes, headless, name):
    with pytest.raises(InvalidParameter, match=name):
        EngineArgs(**wishes).create_engine_config(headless=headless)


def test_copies_on_several_machines_are_equal_parts():
    wishes = {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}
    found = EngineArgs(**wishes).create_engine_config().parallel
    assert (found.nnodes, found.data_parallel_ranks) == (1, (0,))
    with pytest.raises(NotBuiltYet, match="a multiple of nnodes"):
        EngineArgs(**{**wishes, "data_parallel_size": 3}).create_engine_config()


@pytest.mark.parametrize(
    ("name", "found"), [("192.0.2.7", "192.0.2.7"), ("localhost", "127.0.0.1")]
)
def test_a_name_stands_for_an_address_of_the_first_machine(name, found):
    assert address_here("master_addr", name) == found


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.1.1", "which other machines do not reach"), (None, "nobody knows")],
)
def test_a_name_that_others_do_not_reach_is_refused(monkeypatch, address, words):
    def look(name, port, type):
        if address is None:
            raise socket.gaierror("not known")
        return [(socket.AF_INET, type, 0, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    with pytest.raises(InvalidParameter, match=f"master_addr.*{words}"):
        address_here("master_addr", "a-machine")
