"""Descriptions of machines as their /proc and /sys give them: {path: text}, a few files each."""

from __future__ import annotations

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def describe(cores, *, caches=None, nodes=(), allowed=None, online=None):
    """The files of a machine. `cores`: the logical CPUs of each core, as `0,4`. `caches`: the same
    of each last-level cache, all in one by default. `nodes`: of each NUMA node its CPUs, distances
    and free kilobytes. `allowed`, `online`: all CPUs by default.
    """
    everyone = ",".join(cores)
    files = {
        f"{CPU}/online": online or everyone,
        "proc/thread-self/status": f"Name:\tx\nCpus_allowed_list:\t{allowed or everyone}\n",
        "proc/self/cgroup": "0::/\n",
    }
    for core in cores:
        for cpu in core.split(","):
            shared = [c for c in caches or [everyone] if cpu in c.split(",")]
            files |= {
                f"{CPU}/cpu{cpu}/topology/core_cpus_list": core,
                f"{CPU}/cpu{cpu}/cache/index0/level": "1",
                f"{CPU}/cpu{cpu}/cache/index0/shared_cpu_list": core,
                f"{CPU}/cpu{cpu}/cache/index1/level": "3",
                f"{CPU}/cpu{cpu}/cache/index1/shared_cpu_list": shared[0],
            }
    for number, (cpus, distances, free) in enumerate(nodes):
        files |= {
            f"{NODE}/node{number}/cpulist": cpus,
            f"{NODE}/node{number}/distance": distances,
            f"{NODE}/node{number}/meminfo": f"Node {number} MemTotal: 99 kB\n"
            f"Node {number} MemFree: {free} kB\nNode {number} Inactive(file): 1 kB\n",
        }
    if nodes:
        files[f"{NODE}/online"] = f"0-{len(nodes) - 1}"
    return files


def write(root, files):
    """Write the files below the folder `root`, and return it."""
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def rated(name, ratings):
    """A file of each logical CPU that rates its speed."""
    return {f"{CPU}/cpu{cpu}/{name}": str(rating) for cpu, rating in enumerate(ratings)}


P_AND_E = ["0,1", "2,3", "4", "5", "6", "7"]
LAPTOP = describe(P_AND_E) | {
    "sys/devices/cpu_core/cpus": "0-3",
    "sys/devices/cpu_atom/cpus": "4-7",
}
THIN_LAPTOP = describe(["0,1", "2", "3", "4"]) | {
    "sys/devices/cpu_core/cpus": "0-1",
    "sys/devices/cpu_atom/cpus": "2-4",
}
TWO_SOCKETS = ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"]
SERVER = describe(
    TWO_SOCKETS,
    caches=["0,1,2,3,8,9,10,11", "4,5,6,7,12,13,14,15"],
    nodes=[("0-3,8-11", "10 21", 500), ("4-7,12-15", "21 10", 800)],
)
SUB_NUMA = describe(
    ["0", "1", "2", "3"],
    nodes=[("0", "10 12 32 32", 9), ("1", "12 10 32 32", 9),
           ("2", "32 32 10 12", 9), ("3", "32 32 12 10", 9)],
)  # fmt: skip
ZEN = describe(
    ["0,4", "1,5", "2,6", "3,7"], caches=["0,1,4,5", "2,3,6,7"], nodes=[("0-7", "10", 9)]
) | rated("acpi_cppc/highest_perf", [236, 231, 196, 191, 236, 231, 196, 191])
PHONE = describe([str(cpu) for cpu in range(8)]) | rated(
    "cpu_capacity", [250, 250, 250, 250, 780, 780, 780, 1024]
)
BOARD = describe([str(cpu) for cpu in range(4)]) | rated(
    "cpufreq/cpuinfo_max_freq", [900_000, 900_000, 2_000_000, 2_000_000]
)
CONTAINER = describe(TWO_SOCKETS, allowed="4-6,12-15", nodes=[("0-3,8-11", "10 21", 9),
                     ("4-7,12-15", "21 10", 9)]) | {
    "proc/self/cgroup": "0::/pod/box\n",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
}  # fmt: skip
BARE_VM = {
    "proc/thread-self/status": "Cpus_allowed_list:\t0-3\n",
    "proc/cpuinfo": "processor\t: 0\n\nprocessor\t: 1\n\nprocessor\t: 2\n\nprocessor\t: 3\n",
}
OLD_VM = {
    "proc/thread-self/status": "Cpus_allowed_list:\t0-3\n",
    "proc/cpuinfo": "\n\n".join(
        f"processor\t: {cpu}\nphysical id\t: 0\ncore id\t\t: {cpu % 2}" for cpu in range(4)
    ),
}
OFFLINE = describe(["0,2", "1"], allowed="0-63", online="0-2")
ONE_CPU = describe(["0"], nodes=[("0", "10", 9)])
