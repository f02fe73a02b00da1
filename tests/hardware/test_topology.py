"""Which cores a machine has, and where threads are placed on them, from trees of system files."""

import pytest

from quire.hardware.cpu_list import format_cpus, parse_cpus
from quire.hardware.host import gather_machine_facts
from quire.hardware.placement import place
from tests.hardware import machines


@pytest.fixture
def facts_of(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    return lambda files: gather_machine_facts(machines.write(tmp_path, files))


@pytest.mark.parametrize(
    ("files", "num_cpus", "num_cores", "num_threads", "room", "reason"),
    [
        (machines.LAPTOP, 8, 6, 2, "0,2",
         "one for each performance core; 4 efficiency cores are left to the rest"),
        (machines.THIN_LAPTOP, 5, 4, 4, "0,2-4", "one for each core, 3 of them efficiency cores"),
        (machines.SERVER, 16, 8, 4, "4-7", "one for each core that this process may use of NUMA "
         "node 1; tensor_parallel_size=2 or data_parallel_size=2 uses all nodes"),
        (machines.SUB_NUMA, 4, 4, 2, "0-1", "one for each core that this process may use of NUMA "
         "node 0; tensor_parallel_size=2 or data_parallel_size=2 uses all nodes"),
        (machines.ZEN, 8, 4, 4, "0-3", "one for each core that this process may use"),
        (machines.PHONE, 8, 8, 4, "4-7",
         "one for each performance core; 4 efficiency cores are left to the rest"),
        (machines.BOARD, 4, 4, 2, "2-3",
         "one for each performance core; 2 efficiency cores are left to the rest"),
        (machines.CONTAINER, 7, 3, 3, "4-6,15", "the container's quota of 2.5 CPUs"),
        (machines.BARE_VM, 4, 4, 4, "", "one for each core that this process may use"),
        (machines.OLD_VM, 4, 2, 2, "0-1", "one for each core that this process may use"),
        (machines.OFFLINE, 3, 2, 2, "0-1", "one for each core that this process may use"),
        (machines.ONE_CPU, 1, 1, 1, "", "one for each core that this process may use"),
    ],
    ids=["hybrid laptop", "two kinds, few fast", "two sockets", "four nodes of two sockets",
         "two dies", "big.LITTLE", "frequencies alone", "cpuset and quota", "no topology",
         "cpuinfo alone", "offline CPUs", "one CPU"],
)  # fmt: skip
def test_threads_sit_on_the_fast_cores_of_one_node(
    facts_of, files, num_cpus, num_cores, num_threads, room, reason
):
    facts = facts_of(files)
    assert (facts.num_cpus, facts.num_cores) == (num_cpus, num_cores)
    placement = place(facts)
    assert placement.num_threads == num_threads
    assert [format_cpus(cpus) for cpus in placement.rooms] == [room]
    assert placement.reason == reason


def test_last_level_caches_are_told_apart(facts_of):
    facts = facts_of(machines.ZEN)
    assert [cpu.cache for cpu in facts.cpus] == [0, 0, 2, 2, 0, 0, 2, 2]
    assert not any(cpu.is_efficient for cpu in facts.cpus), "favoured cores are not the only ones"


@pytest.mark.parametrize(
    ("cpu_threads", "room"), [(1, "0,2"), (2, "0,2"), (3, "0,2,4-7"), (6, "0,2,4-7")]
)
def test_efficiency_cores_come_after_performance_cores(facts_of, cpu_threads, room):
    placement = place(facts_of(machines.LAPTOP), num_threads=cpu_threads)
    assert placement.num_threads == cpu_threads and format_cpus(placement.rooms[0]) == room


@pytest.mark.parametrize(
    ("num_engines", "cpu_threads", "num_threads", "rooms"),
    [
        (1, 2, 2, ["4-7"]),
        (1, 5, 5, ["0-7"]),
        (1, 99, 99, ["0-7"]),
        (2, None, 4, ["4-7", "0-3"]),
        (3, None, 2, ["4-7", "0-3", "4-7"]),
        (20, None, 1, ["4-7", "0-3"] * 10),
    ],
)
def test_engines_spread_over_nodes(facts_of, num_engines, cpu_threads, num_threads, rooms):
    placement = place(facts_of(machines.SERVER), num_engines=num_engines, num_threads=cpu_threads)
    assert placement.num_threads == num_threads
    assert [format_cpus(cpus) for cpus in placement.rooms] == rooms


def test_engines_leave_out_a_node_with_few_cores(facts_of):
    files = dict(machines.SERVER)
    files["proc/thread-self/status"] = "Cpus_allowed_list:\t0-4\n"
    placement = place(facts_of(files), num_engines=2)
    assert placement.num_threads == 2 and placement.rooms == ((0, 1, 2, 3),) * 2
    assert place(facts_of(files), num_threads=5).rooms == ((),), "all that it may use"


def test_engines_share_a_quota(facts_of):
    quota = {"sys/fs/cgroup/cpu.max": "400000 100000\n"}
    facts = facts_of(machines.SERVER | quota)
    assert [place(facts, num_engines=n).num_threads for n in (1, 2, 3)] == [4, 2, 1]


def test_the_second_thread_of_a_core_serves_where_the_first_is_not_allowed(facts_of):
    allowed = machines.describe(machines.TWO_SOCKETS, allowed="8,9,10,2")
    assert place(facts_of(allowed)).rooms == ((2, 8, 9),)


def test_the_environment_limits_threads(facts_of, monkeypatch):
    facts = facts_of(machines.SERVER)
    for limit, expected in (("3", (3, "OMP_NUM_THREADS")), ("4", (4, place(facts).reason))):
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        placement = place(facts_of(machines.SERVER))
        assert (placement.num_threads, placement.reason) == expected


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("x,3-,7", {7}), ("1,0", {0, 1})],
)
def test_lists_of_cpus(text, cpus):
    assert parse_cpus(text) == cpus
    assert parse_cpus(format_cpus(cpus)) == cpus


def test_lists_are_written_with_ranges():
    assert format_cpus([8, 0, 1, 2, 10, 11]) == "0-2,8,10-11"
