"""The host as a process sees it: containers of both generations, features, no files."""

import math
import resource

import psutil
import pytest

from quire.hardware import host

TWO_CORES_FOUR_THREADS = "\n\n".join(
    f"processor\t: {cpu}\nmodel name\t: Some CPU @ 2 GHz\nphysical id\t: 0\n"
    f"core id\t\t: {cpu % 2}\nflags\t\t: fpu avx2 avx512_bf16"
    for cpu in range(4)
)


def reader(files):
    return lambda path: files.get(path, "")


def test_name_and_features():
    assert host.cpu_name(TWO_CORES_FOUR_THREADS) == "Some CPU @ 2 GHz"
    assert host.cpu_features(TWO_CORES_FOUR_THREADS) == ("avx2", "avx512_bf16")
    assert host.cpu_features("Features : fp asimd svebf16") == ("asimd", "sve_bf16")
    assert host.cpu_features("") == ()


def test_memory_of_the_narrowest_group_version_2():
    files = {
        "/proc/self/cgroup": "0::/outer/inner\n",
        "/sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "/sys/fs/cgroup/outer/inner/memory.current": "5\n",
        "/sys/fs/cgroup/outer/memory.max": "1000000\n",
        "/sys/fs/cgroup/outer/memory.current": "700000\n",
        "/sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 200000\n",
    }
    assert host.memory(reader(files)) == (1_000_000, 500_000, "the container")


def test_memory_of_version_1():
    files = {
        "/proc/self/cgroup": "4:memory,x:/job\n1:cpu:/\n0::/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1200000\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1\n",
    }
    assert host.memory(reader(files)) == (1_000_000, 0, "the container")


def test_limits_of_the_process_leave_what_libraries_do_not_map(monkeypatch):
    limits = {resource.RLIMIT_AS: 3 << 30, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], -1))
    statm = reader({"/proc/self/statm": f"{(1 << 30) // resource.getpagesize()} 9 9 1 0 7 0\n"})
    (own,) = host.process_limits(statm, num_threads=2)
    assert (own.limit, own.name) == (3 << 30, "ulimit -v")
    assert 1 << 30 < own.free < 2 << 30, "less than is not mapped yet"
    assert host.memory(reader({}), [own]) == (3 << 30, own.free, "ulimit -v")
    limits[resource.RLIMIT_AS], limits[resource.RLIMIT_DATA] = resource.RLIM_INFINITY, 1 << 20
    assert host.memory(reader({}), host.process_limits(statm, 2)) == (1 << 20, 0, "ulimit -d")


def test_memory_without_limits_is_the_machines():
    total, free, source = host.memory(reader({}))
    assert (total, source) == (psutil.virtual_memory().total, "the machine")
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "/proc/self/cgroup": "1:cpu:/\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
    ],
    ids=["none", "max", "v2", "v1"],
)
def test_quota(files, quota):
    assert host.cpu_quota(reader(files)) == quota


def test_this_machine():
    facts = host.gather_machine_facts()
    assert 1 <= facts.num_cores <= facts.num_cpus
    assert 0 < facts.free_memory_bytes <= facts.total_memory_bytes
