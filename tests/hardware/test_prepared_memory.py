"""Memory for weights that a thread touches while a process does something else."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.hardware.native import find_native

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None or sys.platform != "linux", reason=REASON)
MIB = 1 << 20


def mapped_mib():
    """The size of this process's memory."""
    gc.collect()
    pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(pages) * 4096 / MIB


@pytest.fixture
def prepared():
    """64 MiB that are being touched."""
    before = mapped_mib()
    NATIVE.prepare_memory(64 * MIB)
    yield before
    NATIVE.end_preparation()
    assert mapped_mib() < before + 16, "nothing of it is left"


def test_it_is_taken_in_order_while_it_lasts(prepared):
    taken = [NATIVE.allocate(size * MIB) for size in (2, 30, 32, 2)]
    first, second, third, fourth = (buffer.address for buffer in taken)
    assert (second, third) == (first + 2 * MIB, first + 32 * MIB)
    assert fourth != first + 64 * MIB or mapped_mib() > prepared + 66


def test_small_memory_is_not_taken_from_it(prepared):
    address = NATIVE.allocate(MIB).address
    assert NATIVE.allocate(2 * MIB).address != address


def test_what_is_written_stays(prepared):
    """Its taker writes while the thread touches what follows."""
    arrays = [np.frombuffer(NATIVE.allocate(4 * MIB), np.uint8) for _ in range(16)]
    for number, array in enumerate(arrays, 1):
        assert not array.any()
        array[:] = number
    NATIVE.end_preparation()
    assert all((array == number).all() for number, array in enumerate(arrays, 1))


def test_memory_that_was_freed_is_not_touched_again(prepared):
    for _ in range(16):
        buffer = NATIVE.allocate(4 * MIB)
        np.frombuffer(buffer, np.uint8)[:] = 1
        del buffer


@pytest.mark.full
def test_one_preparation_at_a_time(prepared):
    NATIVE.prepare_memory(1 << 50)
    assert mapped_mib() < prepared + 128


def test_an_end_without_a_beginning_does_nothing():
    NATIVE.end_preparation()
    NATIVE.prepare_memory(0)
    NATIVE.end_preparation()
