"""Small kernels, each wrong in one way, and their correct twins, for test_triton_memory: run in a
process of its own with TRITON_INTERPRET=1; prints JSON: for each, what the watch said, or null.
"""

# ruff: noqa: ANN001, ANN201, N803

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from tests.kernels.triton.triton_memory import MemoryFault, Watch


@triton.jit
def shift(x, n, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Each program adds what the next one writes, in place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    more = tl.load(x + at + AHEAD, at + AHEAD < n, other=0.0)
    tl.store(x + at, more + 1.0, at < n)


@triton.jit
def count(total, ATOMIC: tl.constexpr, ONE_PROGRAM: tl.constexpr):
    """A counter for all programs."""
    if ATOMIC:
        tl.atomic_add(total, 1.0)
    else:
        at = total + tl.program_id(0) * (0 if ONE_PROGRAM else 1) + tl.arange(0, 128) * 4
        tl.store(at, tl.load(at) + 1.0)


@triton.jit
def count_and_look(total, seen):
    """A counter, atomic, that is also read as plain memory."""
    tl.atomic_add(total, 1.0)
    tl.store(seen + tl.program_id(0), tl.load(total))


@triton.jit
def through_memory(x, room, out, BARRIER: tl.constexpr):
    """A program turns its numbers around by way of memory."""
    lane, at = tl.arange(0, 128), tl.program_id(0) * 128
    tl.store(room + at + lane, tl.load(x + at + lane))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + at + lane, tl.load(room + at + 127 - lane))


@triton.jit
def turn_in_place(x, BARRIER: tl.constexpr):
    """A thread stores over what another thread has yet to load."""
    lane, at = tl.arange(0, 128), tl.program_id(0) * 128
    values = tl.load(x + at + lane)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at + 127 - lane, values)


@triton.jit
def add_one(x, LANES: tl.constexpr):
    """In place; with fewer lanes than threads several threads have a lane."""
    at = x + tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(at, tl.load(at) + 1.0)


@triton.jit
def to_one_place(x, out, SAME: tl.constexpr):
    """All lanes of a store write to one place."""
    lane = tl.arange(0, 128)
    values = tl.load(x + lane * (0 if SAME else 1))
    tl.store(out + tl.program_id(0) + lane * 0, values)


@triton.jit
def rows(x, out, width, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < (width if MASKED else BLOCK)
    tl.store(out + at, tl.load(x + at, inside), tl.arange(0, BLOCK) < width)


@triton.jit
def fill(out, BLOCK: tl.constexpr, STEP: tl.constexpr, SAME: tl.constexpr):
    """Programs fill blocks that lie STEP apart."""
    value = 1 if SAME else tl.program_id(0)
    tl.store(out + tl.program_id(0) * STEP + tl.arange(0, BLOCK), value)


@triton.jit
def two_outputs(a, b):
    """The same numbers twice."""
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(a + at, at)
    tl.store(b + at, at + 1)


@triton.jit
def bytes_of_words(words, bytes_, SECOND: tl.constexpr):
    """The first program writes a word, the second a byte."""
    if tl.program_id(0) == 0:
        tl.store(words, 7)
    else:
        tl.store(bytes_ + SECOND, 1)


@triton.jit
def draw_numbers(last, out):
    """Each program takes the next number."""
    tl.store(out + tl.program_id(0), tl.atomic_add(last, 1))


@triton.jit
def nothing():
    """Programs and no more."""


def zeros(count, dtype=torch.float32):
    return torch.zeros(count, dtype=dtype)


def gap():
    """A view in a larger buffer: reading behind it is reading somebody else's numbers."""
    return zeros(1000)[100:700]


def overlapping(apart):
    whole = zeros(2048, torch.int32)
    return whole[:512], whole[apart : apart + 512]


def as_bytes(second):
    words = zeros(8, torch.int32)
    return lambda: bytes_of_words[(2,)](words, words.view(torch.uint8), second)


CASES = {
    "read what another program writes": lambda: shift[(4,)](zeros(512), 512, 128, 1),
    "read what it writes itself": lambda: shift[(4,)](zeros(512), 512, 128, 0),
    "lost update": lambda: count[(3,)](zeros(512), False, True),
    "a counter for each program": lambda: count[(3,)](zeros(512), False, False),
    "atomic counter": lambda: count[(3,)](zeros(1), True, True),
    "atomic and plain": lambda: count_and_look[(3,)](zeros(1), zeros(3)),
    "through memory": lambda: through_memory[(2,)](zeros(256), zeros(256), zeros(256), False),
    "through memory, barrier": lambda: through_memory[(2,)](
        zeros(256), zeros(256), zeros(256), True
    ),
    "stored before it is loaded": lambda: turn_in_place[(2,)](zeros(256), False),
    "stored before it is loaded, barrier": lambda: turn_in_place[(2,)](zeros(256), True),
    "in place, several threads a lane": lambda: add_one[(2,)](zeros(64), 32),
    "in place, a thread a lane": lambda: add_one[(2,)](zeros(64), 32, num_warps=1),
    "several values in one place": lambda: to_one_place[(2,)](torch.rand(128), zeros(2), False),
    "one value in one place": lambda: to_one_place[(2,)](torch.rand(128), zeros(2), True),
    "behind the end": lambda: rows[(6,)](gap(), zeros(600), 100, 128, False),
    "up to the end": lambda: rows[(6,)](gap(), zeros(600), 100, 128, True),
    "before the start": lambda: shift[(1,)](gap(), 600, 128, -1),
    "no memory at all": lambda: rows[(1,)](zeros(0), zeros(8), 8, 8, True),
    "blocks overlap": lambda: fill[(4,)](zeros(512, torch.int32), 128, 100, False),
    "blocks overlap, same value": lambda: fill[(4,)](zeros(512, torch.int32), 128, 100, True),
    "blocks lie apart": lambda: fill[(4,)](zeros(512, torch.int32), 128, 128, False),
    "outputs overlap": lambda: two_outputs[(4,)](*overlapping(500)),
    "outputs lie apart": lambda: two_outputs[(4,)](*overlapping(512)),
    "a byte of a word": as_bytes(3),
    "the byte behind a word": as_bytes(4),
    "a grid too large": lambda: add_one[(1, 65_536)](zeros(128), 128),
    "a grid as large": lambda: nothing[(65_536, 1)](),
}


def order_of_programs():
    """The place that each program of a launch had."""
    places = zeros(20, torch.int32)
    draw_numbers[(20,)](zeros(1, torch.int32), places)
    return places.tolist()


def main() -> None:
    said = {}
    with Watch() as watch:
        for name, launch in CASES.items():
            try:
                launch()
                said[name] = None
            except Exception as error:
                said[name] = str(error) if isinstance(error, MemoryFault) else repr(error)
        orders = [order_of_programs() for _ in range(2)]
    print(json.dumps({"said": said, "faults": watch.faults, "orders": orders}))


if __name__ == "__main__":
    main()
