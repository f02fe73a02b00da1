"""Cores, caches and NUMA nodes of the logical CPUs of a Linux machine, and which of
them are slow, as /sys and /proc describe it.

Every file may be missing, as in many virtual machines: then each logical CPU is a core of its own,
as fast as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from quire.hardware.cpu_list import parse_cpus
from quire.hardware.facts import LogicalCpu

Read = Callable[[str], str]
"""Returns the text of a system file; empty if it does not exist."""

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"
_NEAR = 15
"""NUMA nodes at most this far away (10 is a node itself) are parts of one socket."""

_EFFICIENT = 0.6
"""A core with less than this share of the fastest one's rating is an efficiency core."""
_RATINGS = ("cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq")
"""Files of a logical CPU that rate its speed, the best first."""
_EFFICIENT_PMUS = ("cpu_atom", "cpu_lowpower")
"""Intel's hybrid processors list their efficiency cores as devices of their own."""


def read_below(root: Path) -> Read:
    """A reader of the system files below `root`, which is / but in tests."""

    def read(path: str) -> str:
        try:
            return (root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    return read


def usable_cpus(read: Read) -> frozenset[int]:
    """The logical CPUs that the calling thread may run on: its affinity, which the container's
    cpuset is part of, without those that are offline. Empty where no file says it.
    """
    allowed: frozenset[int] = frozenset()
    for line in read("/proc/thread-self/status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            allowed = parse_cpus(line.partition(":")[2])
    online = parse_cpus(read(f"{_CPU}/online"))
    return allowed & online or allowed


def read_topology(read: Read, cpus: frozenset[int]) -> tuple[LogicalCpu, ...]:
    """Describe the logical CPUs `cpus`, in their order."""
    nodes = _nodes(read)
    slow = _efficient(read, cpus)
    cores = _cores(read, cpus)
    return tuple(
        LogicalCpu(
            index=cpu,
            core=cores[cpu],
            cache=min(parse_cpus(read(_cache(read, cpu))) or {cpu}),
            node=nodes.get(cpu, 0),
            is_efficient=cpu in slow,
        )
        for cpu in sorted(cpus)
    )


def node_free_bytes(read: Read, cpus: Iterable[LogicalCpu]) -> dict[int, int]:
    """Free memory and file cache that can be dropped, of each node of `cpus`; a group of near nodes
    is known by its first one, whose own memory is counted.
    """
    return {node: _free(read(f"{_NODE}/node{node}/meminfo")) for node in {c.node for c in cpus}}


def _cores(read: Read, cpus: frozenset[int]) -> dict[int, int]:
    """The first logical CPU of each one's core, whether it is usable or not."""
    found = {}
    by_place = _cores_of_cpuinfo(read("/proc/cpuinfo"))
    for cpu in cpus:
        folder = f"{_CPU}/cpu{cpu}/topology"
        siblings = read(f"{folder}/core_cpus_list") or read(f"{folder}/thread_siblings_list")
        found[cpu] = min(parse_cpus(siblings) or {by_place.get(cpu, cpu)})
    return found


def _cores_of_cpuinfo(text: str) -> dict[int, int]:
    """The cores by /proc/cpuinfo, which names a logical CPU's socket and core on x86."""
    first: dict[tuple[str, str], int] = {}
    found = {}
    for block in text.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if "core id" in fields and fields.get("processor", "").isdigit():
            place = (fields.get("physical id", "0"), fields["core id"])
            found[int(fields["processor"])] = first.setdefault(place, int(fields["processor"]))
    return found


def _cache(read: Read, cpu: int) -> str:
    """The file that lists who shares the last level of `cpu`'s caches."""
    found = ""
    for index in range(8):
        folder = f"{_CPU}/cpu{cpu}/cache/index{index}"
        if not read(f"{folder}/level"):
            break
        found = f"{folder}/shared_cpu_list"
    return found


def _nodes(read: Read) -> dict[int, int]:
    """The NUMA node of each logical CPU; of nodes that are near each other the first."""
    found: dict[int, int] = {}
    numbers = sorted(parse_cpus(read(f"{_NODE}/online")))
    for node in numbers:
        distances = [int(d) for d in read(f"{_NODE}/node{node}/distance").split() if d.isdigit()]
        near = [other for other, far in zip(numbers, distances, strict=False) if far <= _NEAR]
        cpus = parse_cpus(read(f"{_NODE}/node{node}/cpulist"))
        found |= dict.fromkeys(cpus, min(near, default=node))
    return found


def _efficient(read: Read, cpus: frozenset[int]) -> frozenset[int]:
    """The members of `cpus` that belong to efficiency cores, beside faster ones."""
    if read("/sys/devices/cpu_core/cpus"):
        lists = [parse_cpus(read(f"/sys/devices/{pmu}/cpus")) for pmu in _EFFICIENT_PMUS]
        slow = cpus & frozenset().union(*lists)
    else:
        ratings = _ratings(read, cpus)
        best = max(ratings.values(), default=0)
        slow = frozenset(cpu for cpu, rating in ratings.items() if rating < _EFFICIENT * best)
    return slow if slow != cpus else frozenset()


def _ratings(read: Read, cpus: frozenset[int]) -> dict[int, int]:
    """Each logical CPU's speed, from the best file that rates all of them; empty without one."""
    for name in _RATINGS:
        texts = {cpu: read(f"{_CPU}/cpu{cpu}/{name}").strip() for cpu in cpus}
        ratings = {cpu: int(text) for cpu, text in texts.items() if text.isdigit()}
        if len(ratings) == len(cpus) and any(r != max(ratings.values()) for r in ratings.values()):
            return ratings
    return {}


def _free(meminfo: str) -> int:
    """The bytes that a node's meminfo counts as free or as inactive file cache."""
    free = 0
    for line in meminfo.splitlines():
        words = line.split()  # Node 0 MemFree: 1234 kB
        if len(words) > 3 and words[2] in ("MemFree:", "Inactive(file):"):
            free += int(words[3]) << 10
    return free
