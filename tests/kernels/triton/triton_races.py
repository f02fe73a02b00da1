"""What goes wrong only because the programs of a launch, and the threads of a program, run at the
same time, found in a list of what each program read and wrote (see triton_memory).

Between programs nothing is in order: what one writes, no other may read or write, unless all of
them do so with atomics. Within a program Triton orders what a thread does, and not what its threads
see of each other until `tl.debug_barrier()`: which thread has which lane is up to the compiler, so
what was stored is not read again, and what was loaded is stored over only by the same lane of a
block of the same shape, if the block has a lane for every thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

READ, WRITE, ATOMIC = 1, 2, 4
NAMES = {READ: "reads", WRITE: "writes", ATOMIC: "changes atomically"}
SHOWN = 4


@dataclass(frozen=True, slots=True)
class Access:
    """One load, store or atomic of a program: the addresses of the lanes that its mask lets
    through.

    `epoch`: how many barriers came before; `lanes`: None where there is no mask; `values`: the bits
    that are stored, [n, width] uint8; `where`: file and line.
    """

    kind: int
    program: tuple[int, int, int]
    epoch: int
    addresses: np.ndarray
    width: int
    shape: tuple[int, ...]
    lanes: np.ndarray | None
    values: np.ndarray | None
    where: str

    @property
    def span(self) -> tuple[int, int]:
        """First byte and last."""
        return int(self.addresses.min()), int(self.addresses.max()) + self.width - 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong in a launch of a kernel, how often, and examples of it."""

    kernel: str
    what: str
    count: int
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kernel}: {self.what} ({self.count} places)\n  " + "\n  ".join(self.examples)


BETWEEN = "programs race"
BETWEEN_SAME = "programs write the same value to one place"
WITHIN = "threads of a program race"


def races(kernel: str, accesses: Sequence[Access], num_threads: int) -> list[Finding]:
    """Every kind of race among the accesses of a launch, given in the order in which they were
    made.
    """
    found: dict[str, list[str]] = {}
    for group, width in _written(accesses):
        table = Table(group, width, num_threads)
        for what, examples in table.findings():
            found.setdefault(what, []).extend(examples)
    return [
        Finding(kernel, what, len(told), tuple(dict.fromkeys(told))[:SHOWN])
        for what, told in found.items()
    ]


def _written(accesses: Sequence[Access]) -> Iterator[tuple[list[Access], int]]:
    """The accesses that touch something that is written, and the bytes of an entry: apart those of
    one width, for which an entry is one number, and those that see a number as others.
    """
    if not any(access.kind != READ for access in accesses):
        return
    spans = np.array([access.span for access in accesses])
    order = np.argsort(spans[:, 0], kind="stable")
    ends = np.maximum.accumulate(spans[order, 1])
    starts = np.flatnonzero(np.r_[True, spans[order[1:], 0] > ends[:-1]])
    kinds, widths = (np.array([getattr(a, n) for a in accesses])[order] for n in ("kind", "width"))
    is_written = np.bitwise_or.reduceat(kinds, starts) != READ
    aligned = np.array([not (a.addresses % a.width).any() for a in accesses])[order]
    is_one = np.minimum.reduceat(widths, starts) == np.maximum.reduceat(widths, starts)
    is_one &= np.logical_and.reduceat(aligned, starts)
    size = np.where(is_written, np.where(is_one, widths[starts], 1), 0)
    sizes = np.empty(len(order), dtype=np.int64)
    sizes[order] = np.repeat(size, np.diff(np.r_[starts, len(order)]))
    for width in np.unique(sizes[sizes > 0]).tolist():
        yield [accesses[i] for i in np.flatnonzero(sizes == width)], width


class Table:
    """One line for each entry of memory that each access touches: lines of an entry together, and
    among them those of a program together and in the order of time.
    """

    def __init__(self, accesses: Sequence[Access], width: int, num_threads: int) -> None:
        self.accesses = accesses
        parts = [a.width // width for a in accesses]
        units = [_parts(a.addresses, n, width) for a, n in zip(accesses, parts, strict=True)]
        unit = np.concatenate(units)
        order = np.argsort(unit, kind="stable")
        self.unit = unit[order]
        self.access = np.repeat(np.arange(len(accesses)), [len(u) for u in units])[order]
        lanes = [_lanes(a).repeat(n) for a, n in zip(accesses, parts, strict=True)]
        self.lane = np.concatenate(lanes)[order]
        self.value = np.concatenate([_values(a, width) for a in accesses])[order]
        self.kind = self._column([a.kind for a in accesses])
        self.epoch = self._column([a.epoch for a in accesses])
        self.shape = self._column(_numbered([a.shape for a in accesses]))
        self.program = self._column(_numbered([a.program for a in accesses]))
        sizes = [int(np.prod(a.shape)) for a in accesses]
        self.is_one_thread = self._column([size >= num_threads for size in sizes])

    def _column(self, of_accesses: Sequence[int]) -> np.ndarray:
        return np.array(of_accesses)[self.access]

    def findings(self) -> Iterator[tuple[str, list[str]]]:
        """What is wrong, and for each entry where that is so, who did it."""
        starts = np.flatnonzero(np.r_[True, self.unit[1:] != self.unit[:-1]])
        counts = np.diff(np.r_[starts, len(self.unit)])
        kinds = np.bitwise_or.reduceat(self.kind, starts)
        of_many = _varies(self.program, starts)
        is_race = of_many & ((kinds & WRITE > 0) | (kinds == READ | ATOMIC))
        is_same = is_race & (kinds == WRITE) & ~_varies(self.value, starts)
        for what, where in ((BETWEEN, is_race & ~is_same), (BETWEEN_SAME, is_same)):
            if where.any():
                yield what, [self._who(starts[i], counts[i]) for i in np.flatnonzero(where)]
        is_open = (counts > 1) & (kinds != READ) & (kinds != ATOMIC)
        if is_open.any():
            lines = np.flatnonzero(np.repeat(is_open, counts))
            pairs = self._conflicts_within(lines, int(counts[is_open].max()))
            if pairs:
                yield WITHIN, pairs

    def _conflicts_within(self, lines: np.ndarray, longest: int) -> list[str]:
        pairs = {}
        for apart in range(1, longest):
            a, b = lines[:-apart], lines[apart:]
            together = (self.unit[a] == self.unit[b]) & (self.program[a] == self.program[b])
            together &= self.epoch[a] == self.epoch[b]
            a, b = a[together], b[together]
            for i in np.flatnonzero(self._is_conflict(a, b)):
                pairs.setdefault(int(self.unit[a[i]]), self._pair(a[i], b[i]))
        return list(pairs.values())

    def _is_conflict(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Of accesses of one program to one entry without a barrier, a before b."""
        before, after = self.kind[a], self.kind[b]
        is_same_lane = (self.lane[a] == self.lane[b]) & (self.shape[a] == self.shape[b])
        kept = (before == READ) & is_same_lane & self.is_one_thread[a]
        kept |= (before != READ) & (after != READ) & is_same_lane
        kept |= (before == after) & ((before != WRITE) | (self.value[a] == self.value[b]))
        return ~kept

    def _who(self, start: int, count: int) -> str:
        lines = range(start, start + count)
        return "; ".join(list(dict.fromkeys(self._one(i) for i in lines))[:SHOWN])

    def _pair(self, a: int, b: int) -> str:
        return f"{self._one(a)} (lane {self.lane[a]}), then {self._one(b)} (lane {self.lane[b]})"

    def _one(self, line: int) -> str:
        access = self.accesses[self.access[line]]
        return f"{access.program} {NAMES[access.kind]} at {access.where}"


def _parts(addresses: np.ndarray, count: int, width: int) -> np.ndarray:
    if count == 1:
        return addresses
    return (addresses[:, None] + np.arange(count) * width).reshape(-1)


def _lanes(access: Access) -> np.ndarray:
    return np.arange(len(access.addresses)) if access.lanes is None else access.lanes


def _values(access: Access, width: int) -> np.ndarray:
    """What is written to each entry; 0 where nothing is."""
    count = len(access.addresses) * (access.width // width)
    if access.values is None:
        return np.zeros(count, dtype=np.uint64)
    values = np.zeros((count, 8), dtype=np.uint8)
    values[:, :width] = access.values.reshape(count, width)
    return values.view(np.uint64).reshape(-1)


def _numbered(names: Sequence[tuple[int, ...]]) -> list[int]:
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _varies(column: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.minimum.reduceat(column, starts) != np.maximum.reduceat(column, starts)
