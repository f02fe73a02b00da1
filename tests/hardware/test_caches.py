"""Caches as Linux describes them."""

from __future__ import annotations

import pytest

from quire.hardware.caches import victim_cache_bytes

PATH = "/sys/devices/system/cpu/cpu0/cache/index{}/size"
AMD = "processor\t: 0\nvendor_id\t: AuthenticAMD\n"


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
    files["/proc/cpuinfo"] = AMD
    assert victim_cache_bytes(lambda path: files.get(path, "")) == expected


@pytest.mark.parametrize("text", [AMD.replace("AuthenticAMD", "GenuineIntel"), ""])
def test_other_processors_have_other_caches(text: str) -> None:
    files = {PATH.format(3): "32768K", "/proc/cpuinfo": text}
    assert victim_cache_bytes(lambda path: files.get(path, "")) == 0
