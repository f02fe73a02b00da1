"""Threads of workers on the logical CPUs, or on the NUMA nodes, that the user has named.

Memory follows: what a bound thread touches first is on its node.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import InvalidParameter
from quire.hardware.cpu_list import format_cpus, parse_cpus
from quire.hardware.facts import MachineFacts
from quire.hardware.placement import Placement, node_rooms

VARIABLE = "QUIRE_CPU_THREADS_BIND"
NO_BINDING, AUTOMATIC = "nobind", "auto"


def bind_by_lists(
    machine: MachineFacts, option: str, lists: Sequence[str], size: int, num_threads: int | None
) -> Placement:
    """Place the threads of `size` workers on the CPUs that `lists` names for each: as many threads
    as the shortest list has CPUs, or `num_threads`. `option`: where the lists come from.

    Raises InvalidParameter for lists that are not one for each worker, or name CPUs that this
    process may not use.
    """
    if len(lists) != size:
        allowed = f"a list of CPUs for each of {size} workers of this machine, not {len(lists)}"
        raise InvalidParameter(option, list(lists), allowed)
    usable = {cpu.index for cpu in machine.cpus} or set(range(machine.num_cpus))
    rooms = []
    for text in lists:
        cpus = parse_cpus(text)
        if not cpus or not _is_ascending(text):
            raise InvalidParameter(option, text, "CPUs in ascending order, as 0-3 or 0,2,4-7")
        if not cpus <= usable:
            lacking = format_cpus(cpus - usable)
            raise InvalidParameter(option, text, f"this process may not use the CPUs {lacking}")
        rooms.append(tuple(sorted(cpus)))
    return Placement(num_threads or min(map(len, rooms)), tuple(rooms), f"{option} was given")


def bind_by_nodes(
    machine: MachineFacts, nodes: Sequence[str] | None, size: int, num_threads: int | None
) -> Placement:
    """Place the threads of `size` workers each on the cores of a NUMA node: those of `nodes`, or
    by turns all that there are.

    Raises InvalidParameter for nodes that are not one for each worker, or of which this process
    may use no core.
    """
    rooms = node_rooms(machine)
    if nodes is None:
        chosen = [sorted(rooms)[rank % len(rooms)] for rank in range(size)] if rooms else []
        if len(rooms) < 2:
            raise InvalidParameter("numa_bind", True, "this process has cores of one NUMA node")
    else:
        if len(nodes) != size:
            allowed = f"a node for each of {size} workers of this machine"
            raise InvalidParameter("numa_bind_nodes", list(nodes), allowed)
        known = {str(node): node for node in rooms}
        for node in nodes:
            if node not in known:
                allowed = f"this process has cores of the nodes {', '.join(sorted(known))}"
                raise InvalidParameter("numa_bind_nodes", node, allowed)
        chosen = [known[node] for node in nodes]
    sharing = max(chosen.count(node) for node in chosen)
    count = num_threads or max(1, min(len(rooms[node]) for node in chosen) // sharing)
    return Placement(count, tuple(rooms[node] for node in chosen), "the cores of a NUMA node each")


def _is_ascending(text: str) -> bool:
    """Whether a list of CPUs consists of numbers and ranges, each above the one before."""
    ends = [end.strip() for run in text.split(",") for end in run.split("-")]
    numbers = [int(end) for end in ends if end.isdecimal()]
    return len(numbers) == len(ends) and numbers == sorted(set(numbers))
