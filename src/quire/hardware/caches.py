"""The caches of this machine's processors."""

from __future__ import annotations

from pathlib import Path

from quire.hardware.topology import Read, read_below

_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_READ = read_below(Path("/"))
_WITH_VICTIM_CACHES = ("AuthenticAMD", "HygonGenuine")
"""Vendors whose last cache takes what the second one gives up, and nothing else."""
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def victim_cache_bytes(read: Read = _READ) -> int:
    """The size of the first processor's last cache where it takes what the second one gives up; 0
    where it is another kind of cache, or the system does not say it.
    """
    if not any(vendor in read("/proc/cpuinfo") for vendor in _WITH_VICTIM_CACHES):
        return 0
    sizes = (read(f"{_CACHES}/index{index}/size").strip() for index in range(8))
    return max(_num_bytes(size) for size in sizes)


def _num_bytes(size: str) -> int:
    number = size.rstrip("KMG")
    return int(number) * _UNITS.get(size[len(number) :], 1) if number.isdecimal() else 0
