"""Caches as Linux describes them."""

from __future__ import annotations

import subprocess

import pytest

from quire.hardware.caches import last_cache_bytes

PATH = "/sys/devices/system/cpu/cpu0/cache/index{}/size"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (["48K", "32K", "1024K", "32768K"], 32 << 20),
        (["32K\n", "2M\n"], 2 << 20),
        (["4096"], 4096),
        ([], 0),
        (["", "?", "-1K", "1.5M", "K"], 0),
    ],
)
def test_the_largest_cache_is_found(sizes: list[str], expected: int) -> None:
    files = {PATH.format(index): size for index, size in enumerate(sizes)}
    assert last_cache_bytes(lambda path: files.get(path, "")) == expected


def test_this_machine_agrees_with_lscpu() -> None:
    command = ["lscpu", "--caches=ONE-SIZE", "--bytes"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("lscpu does not run here")
    assert last_cache_bytes() == max(map(int, found.split()[1:]), default=0)
