"""The caches of this machine's processors."""

from __future__ import annotations

from pathlib import Path

from quire.hardware.topology import Read, read_below

_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_READ = read_below(Path("/"))
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_cache_bytes(read: Read = _READ) -> int:
    """The size of the first processor's largest cache; 0 where the system does not say it."""
    sizes = (read(f"{_CACHES}/index{index}/size").strip() for index in range(8))
    return max(_num_bytes(size) for size in sizes)


def _num_bytes(size: str) -> int:
    number = size.rstrip("KMG")
    return int(number) * _UNITS.get(size[len(number) :], 1) if number.isdecimal() else 0
