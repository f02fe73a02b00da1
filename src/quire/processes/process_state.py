"""The state of other processes, as the system shows it."""

from __future__ import annotations


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process (Linux)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
