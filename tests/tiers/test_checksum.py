"""The checksum of blocks, and the native copies that make it on the way."""

import numpy as np
import pytest

from quire.hardware.native import find_native
from quire.tiers.checksum import SUM_BYTES, UNIT, content_sum

native, _ = find_native()
SIZES = [1, 63, 64, 65, 640, 1000]


def aligned(size):
    memory = np.full(size + 2 * UNIT, 0xAA, dtype=np.uint8)
    start = -memory.ctypes.data % UNIT
    return memory[start : start + size + UNIT], size


def drawn(size, seed=1):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_every_bit_counts():
    content = drawn(256)
    sums = {content_sum(content)}
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        sums.add(content_sum(content))
        content[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * len(content) and {len(each) for each in sums} == {SUM_BYTES}


def test_order_and_length_count():
    one, two = drawn(UNIT, 1), drawn(UNIT, 2)
    contents = [
        [one, two],
        [two, one],
        [one],
        [one, two, np.zeros(UNIT, np.uint8)],
        [two, one, one],
    ]
    assert len({content_sum(np.concatenate(each)) for each in contents}) == len(contents)
    blanks = [np.zeros(count * UNIT, np.uint8) for count in range(1, 9)]
    assert len(set(map(content_sum, blanks))) == len(blanks)


@pytest.mark.skipif(native is None, reason="no native module")
def test_copies_have_the_sum_of_what_they_copy():
    parts = [drawn(size, size) for size in SIZES]
    padded = [np.pad(part, (0, -len(part) % UNIT)) for part in parts]
    expected = np.concatenate(padded)
    memory, size = aligned(len(expected))
    starts = [part.ctypes.data for part in parts]
    assert native.read_block(starts, SIZES, memory.ctypes.data) == content_sum(expected)
    assert (memory[:size] == expected).all() and (memory[size:] == 0xAA).all()
    back = [np.full(size + 1, 0xBB, dtype=np.uint8) for size in SIZES]
    targets = [part.ctypes.data for part in back]
    assert native.write_block(memory.ctypes.data, targets, SIZES) == content_sum(expected)
    for part, found in zip(parts, back, strict=True):
        assert (found[:-1] == part).all() and found[-1] == 0xBB


@pytest.mark.skipif(native is None, reason="no native module")
def test_what_is_not_aligned_is_refused():
    with pytest.raises(ValueError, match="aligned"):
        native.read_block([], [], 8)
    with pytest.raises(ValueError, match="whole"):
        native.sum_block(64, 65)
