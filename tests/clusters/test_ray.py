"""Cores that Ray starts: what is decided without a cluster, and one case with a real Ray.

All cases with real clusters are in run.py.
"""

import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from quire import EngineArgs, initialize_ray_cluster
from quire.clusters import ray_cluster
from quire.clusters.hosted_process import HostedProcess
from quire.clusters.ray_cluster import nodes_for_cores, usable_bundles
from quire.engine import DPEngineCoreActor, EngineZmqAddresses
from quire.engine.data_parallel.coordinator import CoordinatorMessage
from quire.environment import carried_environment, take_environment
from quire.errors import InvalidParameter
from quire.processes.start_message import encode_start
from tests.house.package import MODULES, ROOT


def test_two_files_import_ray():
    found = {
        module.name
        for module in MODULES
        if any(
            line.strip().startswith(("import ray", "from ray")) for line in module.text.split("\n")
        )
    }
    assert found == {"quire.clusters.ray_cluster", "quire.clusters.ray_process"}


def test_what_ray_starts_is_decided_with_the_plan():
    wishes = {"data_parallel_backend": "ray", "data_parallel_size": 3, "cpu_threads": 2}
    plan = EngineArgs(**wishes, data_parallel_size_local=2).create_engine_config()
    parallel = plan.parallel
    assert parallel.data_parallel_ranks == (0, 1, 2)
    assert (parallel.data_parallel_backend, parallel.data_parallel_size_local) == ("ray", 2)
    assert set(parallel.thread_cpus) == {""}
    assert plan.parallel_config.data_parallel_size_local == 2


@pytest.mark.parametrize(
    "more",
    [
        {"data_parallel_rank": 1},
        {"data_parallel_start_rank": 1},
        {"data_parallel_hybrid_lb": True},
        {"data_parallel_external_lb": True},
        {"enable_expert_parallel": True},
        {"data_parallel_size_local": 3},
        {"data_parallel_size_local": 0},
    ],
)
def test_what_contradicts_it_is_refused(more):
    wishes = EngineArgs(data_parallel_backend="ray", data_parallel_size=2, **more)
    with pytest.raises(InvalidParameter, match=next(iter(more))):
        wishes.create_engine_config()


def test_a_machine_of_a_front_end_elsewhere_has_no_cores_of_ray():
    wishes = EngineArgs(data_parallel_backend="ray", data_parallel_size=2)
    with pytest.raises(InvalidParameter, match="headless"):
        wishes.create_engine_config(headless=True)


# machines


@pytest.fixture
def nodes(monkeypatch):
    """Machines with 4, 4, 1 and 6 CPUs, this one the first."""
    for name in ("QUIRE_RAY_DP_PACK_STRATEGY", "QUIRE_RAY_DP_PLACEMENT_NODE_IPS"):
        monkeypatch.delenv(name, raising=False)
    found = [
        {"NodeID": name, "NodeManagerAddress": f"10.0.0.{number}", "Resources": {"CPU": cpus}}
        for number, (name, cpus) in enumerate([("a", 4.0), ("b", 4.0), ("c", 1.0), ("d", 6.0)], 1)
    ]
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: found)


TWO = {"CPU": 2.0}


def test_each_machine_gets_exactly_its_number_and_small_ones_none(nodes):
    assert nodes_for_cores(5, 2, TWO) == {0: ["a"], 1: ["a"], 2: ["b"], 3: ["b"], 4: ["d"]}


def test_without_a_number_any_machine_with_room_will_do(nodes, monkeypatch):
    assert nodes_for_cores(7, None, TWO) == dict.fromkeys(range(7), ())
    monkeypatch.setenv("QUIRE_RAY_DP_PACK_STRATEGY", "fill")
    assert nodes_for_cores(7, 2, TWO) == dict.fromkeys(range(7), ())


def test_only_named_machines_are_used(nodes, monkeypatch):
    monkeypatch.setenv("QUIRE_RAY_DP_PLACEMENT_NODE_IPS", "10.0.0.2, 10.0.0.4")
    assert nodes_for_cores(4, 2, TWO) == {0: ["b"], 1: ["b"], 2: ["d"], 3: ["d"]}
    assert nodes_for_cores(2, None, TWO) == {0: ["b", "d"], 1: ["b", "d"]}
    monkeypatch.setenv("QUIRE_RAY_DP_PLACEMENT_NODE_IPS", "10.9.9.9")
    with pytest.raises(InvalidParameter, match="room for 0 cores"):
        nodes_for_cores(2, 2, TWO)


@pytest.mark.parametrize(
    ("size", "local", "words"),
    [
        (8, None, "room for 7 cores of 2 CPU each"),
        (8, 2, "room for 6 cores"),
        (3, 3, "the first machine has room for 2 cores"),
    ],
)
def test_a_cluster_that_is_too_small_is_said(nodes, size, local, words):
    with pytest.raises(InvalidParameter, match=words):
        nodes_for_cores(size, local, TWO)


@pytest.mark.parametrize("given", ["span", "", "STRICT"])
def test_a_strategy_that_is_not_there_is_refused(nodes, monkeypatch, given):
    monkeypatch.setenv("QUIRE_RAY_DP_PACK_STRATEGY", given)
    with pytest.raises(InvalidParameter, match="QUIRE_RAY_DP_PACK_STRATEGY"):
        nodes_for_cores(2, None, TWO)


class Group:
    def __init__(self, *bundles):
        self.bundle_specs = list(bundles)


@pytest.mark.parametrize(
    ("given", "size", "bundles"),
    [(None, 2, [1, 2]), ("2,1", 2, [2, 1]), ("0", 1, [0])],
)
def test_workers_take_bundles(monkeypatch, given, size, bundles):
    monkeypatch.delenv("QUIRE_RAY_BUNDLE_INDICES", raising=False)
    if given:
        monkeypatch.setenv("QUIRE_RAY_BUNDLE_INDICES", given)
    assert usable_bundles(Group({"GPU": 1}, {"CPU": 1}, {"CPU": 2}), size, "CPU") == bundles


@pytest.mark.parametrize(
    ("given", "size", "device", "words"),
    [
        (None, 3, "CPU", "3 workers need 3 bundles with a CPU, and it has 2"),
        (None, 1, "GPU", "at most one GPU"),
        ("0,1", 3, "CPU", "one bundle of 3 for each of 3 workers"),
        ("0,3", 2, "CPU", "one bundle of 3 for each of 2 workers"),
        ("0,0", 2, "CPU", "each bundle once"),
        ("a", 1, "CPU", "numbers with commas"),
    ],
)
def test_bundles_that_are_not_there_are_refused(monkeypatch, given, size, device, words):
    monkeypatch.delenv("QUIRE_RAY_BUNDLE_INDICES", raising=False)
    if given:
        monkeypatch.setenv("QUIRE_RAY_BUNDLE_INDICES", given)
    with pytest.raises(InvalidParameter, match=words):
        usable_bundles(Group({"CPU": 1}, {"CPU": 1}, {"GPU": 2}), size, device)


# the environment


def test_settings_travel_and_keys_and_places_do_not(monkeypatch):
    for name in ("QUIRE_CPU_ISA", "HF_TOKEN", "NCCL_DEBUG", "MINE_A", "MINE_B", "OTHER"):
        monkeypatch.setenv(name, "x")
    local = {"QUIRE_CLUSTER_SECRET", "QUIRE_API_KEY", "HF_HOME", "HF_HUB_CACHE", "VLLM_HOST_IP"}
    for name in local:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("QUIRE_RAY_EXTRA_ENV_VARS_TO_COPY", "OTHER")
    monkeypatch.setenv("QUIRE_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "MINE_")
    carried = carried_environment()
    assert {"QUIRE_CPU_ISA", "HF_TOKEN", "NCCL_DEBUG", "MINE_A", "MINE_B", "OTHER"} <= set(carried)
    assert not local & set(carried)
    assert "PATH" not in carried


def test_what_is_set_on_a_machine_stays(monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx2")
    monkeypatch.setenv("MINE_A", "")
    monkeypatch.delenv("MINE_A")
    take_environment({"QUIRE_CPU_ISA": "portable", "MINE_A": "1"})
    assert carried_environment()["QUIRE_CPU_ISA"] == "avx2"


# the part that runs there


def test_a_hosted_process_tells_how_it_ended():
    """A coordinator at addresses that there are not."""
    start = CoordinatorMessage(cores_in="ipc:///no/a", cores_out="", counts_out="", num_cores=1)
    hosted = HostedProcess("quire.engine.data_parallel.coordinator", encode_start(start), {})
    assert hosted.wait_for_init() > 0
    ending = hosted.run()
    assert ending.code == 1
    assert "code 1" in ending.words


HOST = """
import sys
from quire.clusters.hosted_process import HostedProcess
from quire.engine.data_parallel.coordinator import CoordinatorMessage
from quire.processes.start_message import encode_start
a, b, c = (f"ipc://{sys.argv[1]}/{name}" for name in "abc")
message = CoordinatorMessage(cores_in=a, cores_out=b, counts_out=c, num_cores=1)
hosted = HostedProcess("quire.engine.data_parallel.coordinator", encode_start(message), {})
print(hosted.wait_for_init(), flush=True)
print(hosted.run().words, flush=True)
"""


def test_a_hosted_process_ends_with_the_parent_of_its_actor(tmp_path):
    """The parent starts an actor that outlives it, as a raylet does."""
    parent = f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', {HOST!r}, "
    parent += f"{str(tmp_path)!r}], start_new_session=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as raylet:
        first = raylet.stdout.readline()
        raylet.kill()
        process = psutil.Process(int(first))
        try:
            process.wait(30)
        finally:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert raylet.stdout.readline() == "was killed by SIGKILL\n"


def test_an_actor_of_a_core_takes_no_executor_of_its_own():
    plan = EngineArgs().create_engine_config()
    with pytest.raises(InvalidParameter, match="executor_class"):
        DPEngineCoreActor(plan, False, EngineZmqAddresses("ipc://a", "ipc://b"), object)


def test_without_ray_its_absence_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidParameter, match=r"pip install 'quire\[ray\]'"):
        initialize_ray_cluster(EngineArgs().create_engine_config().parallel_config)


@pytest.mark.slow
def test_cores_in_a_real_cluster():
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, "-m", "tests.clusters.run", "--only", "offline"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
