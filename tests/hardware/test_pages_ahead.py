"""Pages that KV memory gets before its blocks are written."""

import ctypes
import mmap
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from quire.hardware.native import find_native
from quire.runner import pages_ahead
from quire.runner.pages_ahead import PagesAhead

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or find_native()[0] is None, reason="needs madvise and native code"
)
BLOCK = 64 << 10
HUGE = 2 << 20


def parts_of(num_blocks: int, count: int = 2) -> list[torch.Tensor]:
    """Memory without pages [num_blocks, BLOCK], `count` times."""
    maps = [mmap.mmap(-1, num_blocks * BLOCK, flags=mmap.MAP_PRIVATE) for _ in range(count)]
    return [torch.frombuffer(each, dtype=torch.uint8).view(num_blocks, BLOCK) for each in maps]


def resident(part: torch.Tensor, first: int, last: int) -> float:
    """Share of the pages of these blocks that the kernel has given."""
    size = (last - first) * BLOCK
    found = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    start = ctypes.c_void_p(part.data_ptr() + first * BLOCK)
    assert ctypes.CDLL(None, use_errno=True).mincore(start, ctypes.c_size_t(size), found) == 0
    return sum(each & 1 for each in found) / len(found)


def wait_until_given(part: torch.Tensor, first: int, last: int) -> None:
    """Wait until the kernel has given all pages of these blocks."""
    until = time.monotonic() + 60
    while resident(part, first, last) < 1:
        assert time.monotonic() < until, "pages are missing"
        time.sleep(0.005)


def test_blocks_behind_a_used_one_get_pages_in_every_part_and_those_far_behind_do_not():
    parts = parts_of(1024)
    assert resident(parts[0], 0, 1024) < 0.1
    pages = PagesAhead(parts)
    pages.expect(3)
    for part in parts:
        wait_until_given(part, 4, 4 + HUGE // BLOCK)
        assert resident(part, 200, 1024) < 0.1


def test_pages_follow_the_highest_block_and_contents_stay():
    parts = parts_of(1024)
    for part in parts:
        part[40].fill_(7)
    pages = PagesAhead(parts)
    for block in range(0, 700, 9):
        pages.expect(block)
    for part in parts:
        wait_until_given(part, 40, 700)
        assert (part[40] == 7).all()
        assert resident(part, 900, 1024) < 0.1
    pages.expect(1023)
    pages.expect(1023)  # nothing is behind the last one


def test_parts_of_the_same_blocks_are_touched_once_and_nothing_behind_the_last_block(monkeypatch):
    touched = []

    class Touches:
        def __init__(self, owner):
            self.touch = lambda start, size: touched.append((start, start + size))

    monkeypatch.setattr(
        pages_ahead, "find_native", lambda: (SimpleNamespace(TouchAhead=Touches), "")
    )
    blocks, others = parts_of(1024)
    keys, values = blocks[:, : BLOCK // 4], blocks[:, BLOCK // 4 :]
    pages = PagesAhead([keys, values, others])
    for block in range(1024):
        pages.expect(block)
    for whole in (blocks, others):
        first, stop = whole.data_ptr(), whole.data_ptr() + whole.nbytes
        found = [at for at in touched if first <= at[0] < stop]
        assert found[0][0] == first + BLOCK and found[-1][1] == stop
        assert all(end == start for (_, end), (start, _) in pairwise(found))


def test_no_thread_touches_memory_that_a_step_fills_at_once_or_that_is_gone():
    threads = threading.active_count()
    PagesAhead(parts_of(HUGE // BLOCK)).expect(5)
    PagesAhead(()).expect(5)
    assert threading.active_count() == threads
    parts = parts_of(1024)
    pages = PagesAhead(parts)
    pages.expect(0)
    began = time.monotonic()
    del pages
    assert time.monotonic() - began < 5
    before = resident(parts[1], 0, 1024)
    time.sleep(0.05)
    assert resident(parts[1], 0, 1024) == before
