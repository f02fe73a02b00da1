"""Placement of engines' threads: one on each physical core, performance cores before
efficiency cores, each engine on one NUMA node.

An efficiency core multiplies about half as fast, and an operation ends with its last thread, so
efficiency cores are left to everything else unless they are more than twice as many: then most of
the machine's arithmetic is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from quire.hardware.facts import LogicalCpu, MachineFacts


class Placement(msgspec.Struct, frozen=True):
    """The threads of each engine, and for each engine the logical CPUs that they may run on.

    Such a room has one logical CPU of each of its cores, and often more cores than threads: which
    of them a thread runs on is the system's choice, which knows what else is running. An empty
    room is not a restriction. `reason` says how the threads were counted.
    """

    num_threads: int
    rooms: tuple[tuple[int, ...], ...]
    reason: str


def place(
    machine: MachineFacts, *, num_engines: int = 1, num_threads: int | None = None
) -> Placement:
    """Place the threads of `num_engines` engines that run on `machine` at the same time.

    `num_threads` is what the user asked for, of each engine; None takes one for each core that
    should compute. Engines are spread over the nodes, but for those with less than half of the
    largest one's cores. With more threads than a node has cores an engine takes further nodes.
    """
    nodes = _nodes(machine)
    most = len(_computing(nodes[0]))
    homes = [node for node in nodes if 2 * len(_computing(node)) >= most]
    if num_threads is None:
        num_threads, reason = _count(machine, homes, num_engines)
    else:
        reason = "cpu_threads was given"
    rooms = [_room(machine, nodes, i % len(homes), num_threads) for i in range(num_engines)]
    return Placement(num_threads, tuple(rooms), reason)


def node_rooms(machine: MachineFacts) -> dict[int, tuple[int, ...]]:
    """The logical CPUs for threads that compute, by NUMA node: one of each core."""
    nodes = [_computing(node) for node in _nodes(machine) if node]
    return {node[0].node: tuple(sorted(cpu.index for cpu in node)) for node in nodes}


def _count(
    machine: MachineFacts, homes: Sequence[Sequence[LogicalCpu]], num_engines: int
) -> tuple[int, str]:
    """Threads of each engine, and why. The engines are spread over the nodes `homes`."""
    used = homes[:num_engines]
    cores = min(len(_computing(node)) for node in used) or machine.num_cores  # nothing is known
    allowed = math.ceil(min(machine.cpu_quota, machine.num_cores))
    sharing = math.ceil(num_engines / len(homes))
    count = max(1, min(cores // sharing, allowed // num_engines))
    reason = _core_reason(homes)
    if num_engines > 1:
        reason = f"{min(allowed, cores * len(used))} cores shared by {num_engines} engines"
    elif allowed < cores:
        count, reason = allowed, f"the container's quota of {machine.cpu_quota:.3g} CPUs"
    limit = machine.thread_limit
    return (limit, "OMP_NUM_THREADS") if limit is not None and limit < count else (count, reason)


def _core_reason(homes: Sequence[Sequence[LogicalCpu]]) -> str:
    node = homes[0]
    slow = sum(cpu.is_efficient for cpu in node)
    if slow and len(_computing(node)) < len(node):
        reason = f"one for each performance core; {slow} efficiency cores are left to the rest"
    elif slow:
        reason = f"one for each core, {slow} of them efficiency cores"
    else:
        reason = "one for each core that this process may use"
    if len(homes) > 1:
        each = f"tensor_parallel_size={len(homes)} or data_parallel_size={len(homes)}"
        reason += f" of NUMA node {node[0].node}; {each} uses all nodes"
    return reason


def _nodes(machine: MachineFacts) -> list[list[LogicalCpu]]:
    """The first usable logical CPU of each core, by node: nodes with the most cores first, then
    those with the most free memory, which other engines have not taken yet.
    """
    firsts: dict[int, LogicalCpu] = {}
    for cpu in machine.cpus:
        firsts.setdefault(cpu.core, cpu)
    nodes: dict[int, list[LogicalCpu]] = {}
    for cpu in firsts.values():
        nodes.setdefault(cpu.node, []).append(cpu)
    free = machine.node_free_bytes
    order = sorted(nodes, key=lambda n: (-len(_computing(nodes[n])), -free.get(n, 0), n))
    return [nodes[node] for node in order] or [[]]


def _computing(cores: Sequence[LogicalCpu]) -> Sequence[LogicalCpu]:
    """The cores of a node that compute unless more threads are asked for."""
    fast = [cpu for cpu in cores if not cpu.is_efficient]
    return cores if len(cores) > 3 * len(fast) else fast


def _room(
    machine: MachineFacts, nodes: Sequence[Sequence[LogicalCpu]], first: int, num_threads: int
) -> tuple[int, ...]:
    """The logical CPUs for the threads of one engine, whose node is nodes[first]."""
    room: list[LogicalCpu] = []
    for node in (*nodes[first:], *nodes[:first]):
        fast = _computing(node)
        room += fast if len(room) + len(fast) >= num_threads else node
        if len(room) >= num_threads:
            break
    chosen = tuple(sorted(cpu.index for cpu in room))
    return () if len(chosen) in (0, len(machine.cpus)) else chosen
