"""Threads on the CPUs and NUMA nodes that the user names, on a machine with two of these."""

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.resolve.resolve import resolve
from quire.errors import InvalidParameter
from quire.hardware.facts import LogicalCpu
from quire.models.cutting.rank_facts import RankFacts
from quire.models.layer_memory import KeyValues
from tests.config.plans import GIB, make_machine, make_model

CPUS = tuple(
    LogicalCpu(index=n, core=n % 16, cache=n // 8 % 2, node=n // 8 % 2, is_efficient=False)
    for n in range(32)
)
SERVER = {
    "cpus": CPUS, "num_cpus": 32, "num_cores": 16, "total_memory_bytes": 256 * GIB,
    "free_memory_bytes": 256 * GIB, "node_free_bytes": {0: 128 * GIB, 1: 128 * GIB},
}  # fmt: skip


def resolved(model, machine, **wishes):
    return resolve(EngineArgs(model=model.name, **wishes), model, machine)


def threads(bind="auto", **wishes):
    plan = resolved(make_model(), make_machine(**SERVER, threads_bind=bind), **wishes)
    return plan.parallel.num_threads, plan.parallel.thread_cpus


def test_each_copy_gets_a_node_and_one_alone_says_how_to_use_all():
    assert threads(data_parallel_size=2) == (8, ("0-7", "8-15"))
    plan = resolved(make_model(), make_machine(**SERVER))
    assert "tensor_parallel_size=2 or data_parallel_size=2 uses" in plan.reasons["num_threads"]


@pytest.mark.parametrize(
    ("bind", "wishes", "lists"),
    [
        ("auto", {}, ("0-7", "8-15")),
        ("auto", {"numa_bind": True, "numa_bind_nodes": ["1", "0"]}, ("8-15", "0-7")),
        ("auto", {"numa_bind": True, "numa_bind_cpus": ["1-2", "9,11"]}, ("1-2", "9,11")),
        ("4-5|12-13", {}, ("4-5", "12-13")),
        ("nobind", {}, ("", "")),
    ],
)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_each_rank_of_a_model_gets_a_node(sizes, bind, wishes, lists):
    tp, pp = sizes
    part = RankFacts(
        memories=(KeyValues(8 // tp, 128),) * (28 // pp), num_parameters=300_000_000,
        stage_layers=(28 // pp,) * pp, same_bits=True,
    )  # fmt: skip
    machine = make_machine(**SERVER, threads_bind=bind)
    wishes = wishes | {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    assert resolved(make_model(rank=part), machine, **wishes).parallel.thread_cpus == lists


def test_nodes_and_cpus_can_be_named():
    assert threads(data_parallel_size=2, numa_bind=True) == (8, ("0-7", "8-15"))
    assert threads(data_parallel_size=2, numa_bind=True, numa_bind_nodes=["1", "0"])[1] == (
        "8-15", "0-7",
    )  # fmt: skip
    both = {"numa_bind": True, "numa_bind_nodes": ["1", "1"]}
    assert threads(data_parallel_size=2, **both) == (4, ("8-15", "8-15"))
    lists = {"numa_bind": True, "numa_bind_cpus": ["0-3", "8,10,12-14"]}
    assert threads(data_parallel_size=2, **lists) == (4, ("0-3", "8,10,12-14"))
    assert threads(data_parallel_size=2, cpu_threads=3, **lists) == (3, ("0-3", "8,10,12-14"))


def test_the_environment_binds_or_leaves_it_to_the_system():
    assert threads("0-5|8-15", data_parallel_size=2) == (6, ("0-5", "8-15"))
    assert threads("nobind", data_parallel_size=2) == (8, ("", ""))


@pytest.mark.parametrize(
    ("bind", "wishes", "why"),
    [
        ("0-3", {}, "a list of CPUs for each of 2 workers of this machine, not 1"),
        ("0-3|40", {}, "may not use the CPUs 40"),
        ("0-3|9,8", {}, "ascending"),
        ("0-3|x", {}, "ascending"),
        ("auto", {"numa_bind_nodes": ["0", "1"]}, "goes with numa_bind"),
        ("auto", {"numa_bind": True, "numa_bind_nodes": ["0"]}, "a node for each of 2"),
        ("auto", {"numa_bind": True, "numa_bind_nodes": ["0", "2"]}, "of the nodes 0, 1"),
    ],
)
def test_what_cannot_be_bound_is_refused(bind, wishes, why):
    with pytest.raises(InvalidParameter, match=why):
        threads(bind, data_parallel_size=2, **wishes)


@pytest.mark.parametrize("option", ["data_parallel_backend", "distributed_executor_backend"])
def test_the_cpus_of_machines_that_ray_chooses_are_not_known(option):
    wishes = {option: "ray", "data_parallel_size": 2}
    assert set(threads(**wishes)[1]) == {""}
    for bind, more in (("0-3|8-11", {}), ("auto", {"numa_bind": True})):
        with pytest.raises(InvalidParameter, match="Ray's choice"):
            threads(bind, **wishes, **more)


def test_one_node_has_nothing_to_bind_to():
    with pytest.raises(InvalidParameter, match="cores of one NUMA node"):
        resolved(make_model(), make_machine(), numa_bind=True)
