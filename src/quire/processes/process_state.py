"""The state of other processes, as the system shows it."""

from __future__ import annotations

import os

ThreadTimes = dict[int, tuple[bool, int]]
"""Whether each thread of a process can run, and for how many ns it has run."""


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process (Linux)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def thread_times(pid: int) -> ThreadTimes:
    """The times of the threads of a process; empty where the system does not show them."""
    found: ThreadTimes = {}
    folder = f"/proc/{pid}/task"
    try:
        for name in os.listdir(folder):
            with open(f"{folder}/{name}/stat", encoding="ascii", errors="replace") as file:
                can_run = file.read().rpartition(")")[2].split()[0] == "R"
            with open(f"{folder}/{name}/schedstat", encoding="ascii") as file:
                found[int(name)] = can_run, int(file.read().split()[0])
    except (OSError, IndexError, ValueError):  # a thread has ended meanwhile
        return {}
    return found


def is_starved(before: ThreadTimes, now: ThreadTimes, passed_s: float) -> bool:
    """Whether a thread that can run has had less than a tenth of the `passed_s` between both."""
    return any(
        can_run and thread in before and ran - before[thread][1] < passed_s * 1e8
        for thread, (can_run, ran) in now.items()
    )
