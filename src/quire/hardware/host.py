"""This process's cores, CPU features, memory and GPU, within the limits of its container."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.environment import read_environment, read_rank_environment
from quire.hardware.disk import free_disk_bytes
from quire.hardware.facts import LogicalCpu, MachineFacts
from quire.hardware.nvidia import find_gpu, torch_cuda_version, torch_for_other_gpus
from quire.hardware.topology import (
    Read,
    node_free_bytes,
    read_below,
    read_topology,
    usable_cpus,
)

_DECISIVE = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16"),
)
_ALIASES = {"svebf16": "sve_bf16"}
_NO_LIMIT = 1 << 60
"""Version 1 control groups write a number near 2**63 for no limit."""

_MAPPED_BYTES = 768 << 20
"""Address space that torch and the other libraries of a core map; measured: 670 MiB."""
_DATA_BYTES = 256 << 20
"""Private memory of the same; measured: 250 MiB."""
_THREAD_BYTES = 72 << 20
"""A thread's stack, and the part of the address space that malloc reserves for it."""


def gather_machine_facts(root: Path = Path("/")) -> MachineFacts:
    """Inspect the machine as it is now; free memory changes from call to call. Descriptions of the
    machine are read below `root`.
    """
    read, environment = read_below(root), read_environment()
    cpus = read_topology(read, usable_cpus(read) or _own_affinity())
    cpu_info = read("/proc/cpuinfo")
    quota = cpu_quota(read)
    num_cores = max(1, math.ceil(min(count_cores(cpus), quota)))
    total, free, source = memory(read, process_limits(read, num_cores))
    gpu, gpu_missing = find_gpu()
    weights_folder = environment.cache_dir / "weights"
    return MachineFacts(
        cpu_name=cpu_name(cpu_info),
        num_cpus=len(cpus) or os.cpu_count() or 1,
        num_cores=num_cores,
        cpus=cpus,
        cpu_quota=quota,
        node_free_bytes=node_free_bytes(read, cpus),
        features=cpu_features(cpu_info),
        total_memory_bytes=total,
        free_memory_bytes=free,
        memory_limit_source=source,
        thread_limit=environment.thread_limit,
        threads_bind=read_rank_environment().threads_bind,
        gpu=gpu,
        gpu_missing=gpu_missing,
        torch_cuda=torch_cuda_version(),
        torch_other=torch_for_other_gpus(),
        weights_folder=str(weights_folder),
        free_disk_bytes=free_disk_bytes(read, weights_folder),
    )


def _own_affinity() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


def count_cores(cpus: Sequence[LogicalCpu]) -> int:
    """Count the physical cores of `cpus`: two threads of a core share its arithmetic units. Without
    any, ask the system for all of its cores.
    """
    if cpus:
        return len({cpu.core for cpu in cpus})
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def cpu_name(cpu_info: str) -> str:
    """The name on the box."""
    for line in cpu_info.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features(cpu_info: str) -> tuple[str, ...]:
    """The features that change a decision or a provider, in a fixed order."""
    words: set[str] = set()
    for line in cpu_info.splitlines():
        if line.startswith(("flags", "Features")):
            words = set(line.partition(":")[2].split())
            break
    return tuple(_ALIASES.get(name, name) for name in _DECISIVE if name in words)


def cpu_quota(read: Read) -> float:
    """CPUs' worth of time that the container may use; infinite without a limit."""
    quota = math.inf
    for folder in _cgroup_folders(read, ""):
        limit, _, period = read(f"{folder}/cpu.max").partition(" ")
        if limit.isdigit() and period.strip().isdigit():
            quota = min(quota, int(limit) / int(period))
    for folder in _cgroup_folders(read, "cpu"):
        old, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
        if old.strip().isdigit() and period.strip().isdigit():
            quota = min(quota, int(old) / int(period))
    return quota


@dataclass(frozen=True, slots=True)
class ProcessLimit:
    """A limit of this process and its children in bytes, what the engine has of it, its name."""

    limit: int
    free: int
    name: str


def process_limits(read: Read, num_threads: int) -> list[ProcessLimit]:
    """The limits on memory that a shell sets (`ulimit -v` and `-d`), where there are some.

    They count what is mapped and not what is used: libraries, and for each thread a stack and a
    heap. This is not left for weights and K/V.
    """
    pages = [int(word) for word in read("/proc/self/statm").split() if word.isdigit()]
    mapped, data = (pages[0], pages[5]) if len(pages) > 5 else (0, 0)
    found = []
    for kind, name, taken, overhead in (
        (resource.RLIMIT_AS, "ulimit -v", mapped, _MAPPED_BYTES),
        (resource.RLIMIT_DATA, "ulimit -d", data, _DATA_BYTES),
    ):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            used = taken * resource.getpagesize() + overhead + num_threads * _THREAD_BYTES
            found.append(ProcessLimit(limit, max(0, limit - used), name))
    return found


def memory(read: Read, limits: Sequence[ProcessLimit] = ()) -> tuple[int, int, str]:
    """Total and free bytes, and whose limit: machine's, control group's, one of `limits`."""
    (total, free), source = _machine_memory(read), "the machine"
    for limit, used in _cgroup_limits(read):
        if limit < total:
            total, source = limit, "the container"
        free = min(free, max(0, limit - used))
    for own in limits:
        if own.limit < total:
            total, source = own.limit, own.name
        free = min(free, own.free)
    return total, free, source


def _machine_memory(read: Read) -> tuple[int, int]:
    """Total and free bytes of the whole machine."""
    lines = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" in lines and "MemAvailable" in lines:
        total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
        return total, free
    import psutil  # for systems that describe themselves otherwise

    machine = psutil.virtual_memory()
    return machine.total, machine.available


def _cgroup_limits(read: Read) -> list[tuple[int, int]]:
    """(limit, used) of each control group with a limit; droppable file cache is not used."""
    found = []
    for folder in _cgroup_folders(read, ""):
        limit, used = read(f"{folder}/memory.max").strip(), read(f"{folder}/memory.current").strip()
        if limit.isdigit() and used.isdigit():
            cache = _stat(read(f"{folder}/memory.stat"), "inactive_file")
            found.append((int(limit), int(used) - cache))
    for folder in _cgroup_folders(read, "memory"):
        limit = read(f"{folder}/memory.limit_in_bytes").strip()
        used = read(f"{folder}/memory.usage_in_bytes").strip()
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
            cache = _stat(read(f"{folder}/memory.stat"), "total_inactive_file")
            found.append((int(limit), int(used) - cache))
    return found


def _cgroup_folders(read: Read, controller: str) -> list[str]:
    """Our control group and those around it; `controller` is empty for version 2."""
    root = "/sys/fs/cgroup" + (f"/{controller}" if controller else "")
    for line in read("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(","):
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        return ["/".join([root, *parts[:count]]) for count in range(len(parts), -1, -1)]
    return []


def _stat(text: str, key: str) -> int:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0
