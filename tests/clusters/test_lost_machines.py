"""A machine that dies before the core that it was given has started there.

Ray lists a machine for a while after its death, and a placement group that is bound to one is never
placed. Ray itself is a fake here: a list of machines, and actors that start where a machine lives.
"""

import importlib
import sys
import time
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

import pytest

from quire import EngineArgs
from quire.clusters import ray_cluster
from quire.clusters.ray_cluster import NODE_LABEL, CoreMachines
from quire.engine import EngineZmqAddresses
from quire.engine.data_parallel import core_actor
from quire.engine.data_parallel.core_actor import RayCores
from quire.engine.process.start_message import StartMessage
from quire.processes.distant_process import Ending

ONE = {"CPU": 1.0}
LONG_S = 30.0


class FakeRay(ModuleType):
    """Ray, as far as a core that it places needs it.

    `listed` are the machines, by id, that it says are alive, and `dead` those that are not. A group
    that is bound to dead machines alone is never placed.
    """

    class RayError(Exception):
        """As in Ray."""

    class RayActorError(RayError):
        """As in Ray."""

    def __init__(self, *nodes):
        super().__init__("ray")
        self.listed, self.dead = list(nodes), set()
        self.groups, self.placed = [], {}
        self.is_initialized = lambda: True
        self.util = SimpleNamespace(
            placement_group=self._group,
            remove_placement_group=self.groups.remove,
            get_node_ip_address=lambda: "a",
        )

    def nodes(self):
        return [
            {"NodeID": node, "NodeManagerAddress": node, "Resources": ONE, "Alive": True}
            for node in self.listed
        ]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "a", gcs_address="a")

    def _group(self, bundles, *, strategy, name, bundle_label_selector):
        assert name not in [group.name for group in self.groups]
        selector = bundle_label_selector[0][NODE_LABEL] if bundle_label_selector else "in()"
        nodes = [node for node in selector[3:-1].split(",") if node] or self.listed
        self.groups.append(SimpleNamespace(name=name, bundle_specs=bundles, nodes=list(nodes)))
        return self.groups[-1]

    def remote(self, kind):
        return SimpleNamespace(options=self._options)

    def _options(self, *, name, scheduling_strategy, **_):
        """An actor class, whose actors start with their machine, and run until they are killed."""
        started, ended = Future(), Future()
        for node in scheduling_strategy.nodes:
            if node not in self.dead:
                self.placed[name] = node
                started.set_result(7)
                break
        actor = SimpleNamespace(ended=ended, wait_for_init=call(started), run=call(ended))
        return SimpleNamespace(remote=lambda **_: actor)

    def kill(self, actor):
        if not actor.ended.done():
            actor.ended.set_result(Ending(-9, "was killed", None))


def call(future):
    return SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: future))


@pytest.fixture
def fake(monkeypatch):
    """A cluster of the machines a (this one), b, c and d, and the module of its processes."""
    for name in ("QUIRE_RAY_DP_PACK_STRATEGY", "QUIRE_RAY_DP_PLACEMENT_NODE_IPS"):
        monkeypatch.delenv(name, raising=False)
    ray = FakeRay("a", "b", "c", "d")
    exceptions = SimpleNamespace(RayError=ray.RayError, RayActorError=ray.RayActorError)
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, number: group)
    for name, module in {
        "ray": ray,
        "ray.exceptions": exceptions,
        "ray.util": ray.util,
        "ray.util.scheduling_strategies": strategies,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_cluster, "require_ray", lambda: ray)
    monkeypatch.delitem(sys.modules, "quire.clusters.ray_process", raising=False)
    ray_process = importlib.import_module("quire.clusters.ray_process")
    monkeypatch.setattr(ray_process, "LOOK_S", 0.01)
    yield ray
    # the module holds the fake
    sys.modules.pop("quire.clusters.ray_process", None)
    vars(sys.modules["quire.clusters"]).pop("ray_process", None)


def core(rank):
    """The process of a core of two, each on a machine of its own, which has been told to start."""
    args = {"data_parallel_backend": "ray", "data_parallel_size": 2, "data_parallel_size_local": 1}
    plan = EngineArgs(**args, cpu_threads=1).create_engine_config()
    process = RayCores(plan.parallel).place(rank, 1)
    addresses = EngineZmqAddresses("ipc://a", "ipc://b")
    process.start(StartMessage(plan=plan, engine_index=rank, incarnation=1, addresses=addresses))
    return process


def wait_for(condition):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def test_a_core_whose_machine_is_found_dead_starts_on_another(fake):
    fake.dead.add("b")
    process = core(1)
    wait_for(lambda: fake.groups)
    assert fake.groups[0].nodes == ["b"], "it is listed as alive"
    fake.listed.remove("b")
    wait_for(lambda: process.pid)
    assert list(fake.placed.values()) == ["c"]
    assert [group.nodes for group in fake.groups] == [["c"]], "the first group was removed"
    process.end(0.0)
    assert not fake.groups


def test_a_core_that_finds_no_other_machine_says_so(fake, monkeypatch):
    monkeypatch.setattr("quire.clusters.ray_process.NEW_MACHINE_S", 0.05)
    fake.listed, fake.dead = ["a", "b"], {"b"}
    process = core(1)
    wait_for(lambda: fake.groups)
    fake.listed.remove("b")
    wait_for(lambda: not process.is_running)
    words = "found no room in the Ray cluster within 0.05 s of the loss of its machine"
    assert process.exit_words() == words
    process.end(0.0)
    assert not fake.groups


def test_a_machine_that_joins_in_time_is_taken(fake):
    fake.listed, fake.dead = ["a", "b"], {"b"}
    process = core(1)
    wait_for(lambda: fake.groups)
    fake.listed.remove("b")
    wait_for(lambda: not fake.groups)
    fake.listed.append("e")
    wait_for(lambda: process.pid)
    assert list(fake.placed.values()) == ["e"]
    process.end(0.0)


def test_a_core_that_waits_for_its_living_machine_is_bounded(fake, monkeypatch):
    monkeypatch.setattr(core_actor, "FIRST_PLACEMENT_S", 0.05)
    fake.dead.add("b")
    process = core(1)
    wait_for(lambda: not process.is_running)
    assert process.exit_words() == "found no room in the Ray cluster within 0.05 s"
    process.end(0.0)


def test_cores_of_a_dead_machine_stay_together_and_alone(fake):
    machines = CoreMachines(3, 1, ONE)
    assert [machines.of(rank) for rank in range(4)] == [["a"], ["b"], ["c"], ()]
    fake.listed.remove("b")
    assert [machines.of(rank) for rank in range(3)] == [["a"], ["d"], ["c"]]
    fake.listed.remove("c")
    assert [machines.of(rank) for rank in range(3)] == [["a"], ["d"], None]
    fake.listed.append("e")
    assert machines.of(2) == ["e"]


def test_two_cores_of_a_machine_move_as_one(fake):
    half = {"CPU": 0.5}
    machines = CoreMachines(4, 2, half)
    fake.listed.remove("b")
    assert [machines.of(rank) for rank in range(4)] == [["a"], ["a"], ["c"], ["c"]]


def test_machines_that_are_filled_are_chosen_again_by_their_room(fake, monkeypatch):
    monkeypatch.setenv("QUIRE_RAY_DP_PLACEMENT_NODE_IPS", "b,c,d,e")
    monkeypatch.setenv("QUIRE_RAY_DP_PACK_STRATEGY", "fill")
    machines = CoreMachines(2, 2, ONE)
    fake.listed = ["a", "e", "f"]
    assert machines.of(1) == ["e"], "it has room for one core"


def test_of_named_machines_only_the_death_of_all_counts(fake, monkeypatch):
    monkeypatch.setenv("QUIRE_RAY_DP_PLACEMENT_NODE_IPS", "b,c,e")
    machines = CoreMachines(2, None, ONE)
    fake.listed.remove("b")
    assert machines.of(0) == ["b", "c"]
    fake.listed.remove("c")
    assert machines.of(0) is None
    fake.listed.append("e")
    assert machines.of(0) == machines.of(1) == ["e"]
