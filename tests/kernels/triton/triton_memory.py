"""Triton's interpreter with an eye on memory: `Watch` sees every access of every program.

The interpreter runs the programs of a launch one after the other and a program as one thread, and
reads whatever an address leads to. Watched, each launch raises `MemoryFault` for

- an access outside of the tensor whose pointer it was made from: to each byte before the first
  element and behind the last, as the tensor's shape and strides have them, not only outside of the
  memory that it is a part of;
- races: see triton_races;
- a grid that no GPU takes;

and its programs run in another order each time, so that whoever compares two runs compares orders.

Not seen: what the memory model of a GPU does to launches that follow each other on several streams,
layouts, what the compiler makes of a kernel, and a lane of a view with gaps that lands in a gap.

As a program, `triton_memory.py SCRIPT ARGS` runs a script under watch.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from tests.kernels.triton.triton_races import (
    ATOMIC,
    BETWEEN,
    BETWEEN_SAME,
    READ,
    WRITE,
    Access,
    Finding,
    races,
)

SAME_VALUE = {
    "_clear_kernel": "every lane of a token writes 0",
    "_bias_kernel": "every entry that forbids a token writes -inf",
    "_words_kernel": "every word that ends with a token writes -inf",
}
"""Kernels of which several programs may write to one place, and why all write the same."""

WARM_UP = dict.fromkeys(
    (
        *("_rope_store_kernel", "_latent_store_kernel"),
        *("_conv_kernel", "_mamba_kernel", "_mamba2_kernel", "_delta_kernel"),
    ),
    "all rows of warm-up share a block whose contents nobody reads",
)
"""Kernels whose programs may write anything to one place when quire.runner.warm_up calls them."""

MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)
"""Of the axes of a grid on a GPU."""

WARP = 32
TAG = 48
"""Addresses have fewer bits. Those above it hold the number of the tensor a pointer comes from."""
ADDRESS = np.uint64((1 << TAG) - 1)
HERE = str(Path(__file__).parent / "triton_")
TRITON = str(Path(triton.__file__).parent)

Program = tuple[int, int, int]
Choice = Callable[[Program, int], list[Program]]


class MemoryFault(Exception):
    """A launch did what a GPU punishes."""


def shuffled(grid: Program, seed: int) -> list[Program]:
    """All programs, in an order of this seed."""
    programs = list(product(*map(range, grid)))
    random.Random(seed).shuffle(programs)
    return programs


def corners(grid: Program, _: int) -> list[Program]:
    """The first and the last programs of each axis: enough where only sizes matter."""
    return list(product(*(sorted({0, size - 1}) for size in grid)))


@dataclass(slots=True)
class Launch:
    """What the programs of one launch do."""

    kernel: str
    grid: Program
    programs: list[Program]
    num_threads: int
    bounds: list[tuple[int, int]] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    program: Program = (0, 0, 0)
    epoch: int = 0

    def tag(self, tensor: torch.Tensor) -> np.uint64:
        """What to add to the tensor's address, by which its pointers are known."""
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        self.bounds.append((tensor.data_ptr(), tensor.data_ptr() + size))
        return np.uint64((len(self.bounds) - 1) << TAG)

    def start(self, number: int) -> None:
        """The next program is the one of this number."""
        self.program, self.epoch = self.programs[number], 0

    def note(self, kind: int, pointers: Any, mask: Any, stored: Any = None) -> None:
        """The current program goes to these addresses where the mask is true."""
        tagged, lanes = pointers.data.reshape(-1), None
        is_let = np.broadcast_to(mask.data, pointers.data.shape).reshape(-1)
        if not is_let.all():
            lanes = np.flatnonzero(is_let)
            tagged = tagged[lanes]
        if not len(tagged):
            return
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        where = _line_of_kernel()
        self._check_bounds(tagged, width, f"{self.program} at {where}")
        values = None if stored is None else _bits(stored.data, pointers.data.shape, lanes, width)
        addresses = (tagged & ADDRESS).astype(np.int64)
        shape = pointers.data.shape
        self.accesses.append(
            Access(kind, self.program, self.epoch, addresses, width, shape, lanes, values, where)
        )

    def _check_bounds(self, tagged: np.ndarray, width: int, who: str) -> None:
        low, high = int(tagged.min()), int(tagged.max())
        if low >> TAG == high >> TAG < len(self.bounds):
            begin, end = self.bounds[low >> TAG]
            address = int(ADDRESS)
            if begin <= low & address and (high & address) + width <= end:
                return
            text = f"bytes {(low & address) - begin} .. {(high & address) + width - begin - 1}"
            problem = f"{text} of argument {low >> TAG}, which has {end - begin}"
        else:
            problem = "pointers of several tensors, or of none"
        raise MemoryFault(str(Finding(self.kernel, "out of bounds", 1, (f"{who}: {problem}",))))


class Watch:
    """While active, launches are watched. `choose`: which programs of a grid run, in which order,
    given the number of the launch; `faults`: every one that was raised.
    """

    def __init__(self, choose: Choice = shuffled) -> None:
        self.faults: list[str] = []
        self.num_launches = 0
        self._choose = choose
        self._launch: Launch | None = None
        self._patches = ExitStack()

    def __enter__(self) -> Watch:
        builder, patch = interpreter.interpreter_builder, self._patch
        patch(interpreter.GridExecutor, "__call__", self._call)
        patch(interpreter, "_implicit_cvt", self._convert)
        patch(builder, "set_grid_dim", self._set_grid_dim)
        patch(builder, "set_grid_idx", self._set_grid_idx)
        patch(builder, "create_masked_load", self._load)
        patch(builder, "create_masked_store", self._store)
        patch(builder, "create_atomic_rmw", self._atomic_rmw)
        patch(builder, "create_atomic_cas", self._atomic_cas)
        patch(builder, "create_barrier", self._barrier)
        patch(builder, "create_dot", _dot)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _patch(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self._patches.enter_context(mock.patch.object(owner, name, call))

    def _call(self, original: Any, executor: Any, *args: Any, **kwargs: Any) -> None:
        grid = (*executor.grid, 1, 1)[:3]
        programs = self._choose(grid, self.num_launches)
        num_threads = WARP * kwargs.get("num_warps", 4)
        self.num_launches += 1
        self._launch = launch = Launch(executor.fn.__name__, grid, programs, num_threads)
        executor.grid = (len(programs), 1, 1)
        try:
            self._check_grid(grid)
            original(executor, *args, **kwargs)
            self._check_races(launch)
        except interpreter.InterpreterError as error:
            if isinstance(error.__cause__, MemoryFault):
                raise self._kept(error.__cause__) from None
            raise
        finally:
            self._launch = None

    def _kept(self, fault: MemoryFault) -> MemoryFault:
        self.faults.append(str(fault))
        return fault

    def _check_grid(self, grid: Program) -> None:
        if any(size > most for size, most in zip(grid, MOST_PROGRAMS, strict=True)):
            raise self._kept(MemoryFault(f"{self._launch.kernel}: no GPU has a grid of {grid}"))

    def _check_races(self, launch: Launch) -> None:
        found = races(launch.kernel, launch.accesses, launch.num_threads)
        if launch.kernel in SAME_VALUE:
            found = [one for one in found if one.what != BETWEEN_SAME]
        if launch.kernel in WARM_UP and _is_called_from("warm_up.py"):
            found = [one for one in found if one.what not in (BETWEEN, BETWEEN_SAME)]
        if found:
            raise self._kept(MemoryFault("\n".join(map(str, found))))

    def _convert(self, original: Any, value: Any) -> Any:
        converted = original(value)
        if self._launch is not None and isinstance(value, torch.Tensor):
            converted.handle.data = converted.handle.data | self._launch.tag(value)
        return converted

    def _set_grid_dim(self, original: Any, *_: int) -> None:
        original(*self._launch.grid)

    def _set_grid_idx(self, original: Any, number: int, *_: int) -> None:
        self._launch.start(number)
        original(*self._launch.program)

    def _load(self, original: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        self._launch.note(READ, pointers, mask)
        return original(_plain(pointers), mask, *rest)

    def _store(self, original: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._launch.note(WRITE, pointers, mask, value)
        return original(_plain(pointers), value, mask, *rest)

    def _atomic_rmw(self, original: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any):
        self._launch.note(ATOMIC, pointers, mask)
        return original(op, _plain(pointers), value, mask, *rest)

    def _atomic_cas(self, original: Any, pointers: Any, *rest: Any) -> Any:
        everywhere = np.ones(pointers.data.shape, bool)
        mask = interpreter.TensorHandle(everywhere, triton.language.int1)
        self._launch.note(ATOMIC, pointers, mask)
        return original(_plain(pointers), *rest)

    def _barrier(self, original: Any) -> None:
        self._launch.epoch += 1
        original()


def _plain(pointers: Any) -> Any:
    return interpreter.TensorHandle(pointers.data & ADDRESS, pointers.dtype)


def _bits(values: np.ndarray, shape: Any, lanes: np.ndarray | None, width: int) -> np.ndarray:
    """What is stored by these lanes, [n, width] uint8."""
    flat = np.broadcast_to(values, shape).reshape(-1)
    flat = np.ascontiguousarray(flat if lanes is None else flat[lanes])
    return flat.view(np.uint8).reshape(len(flat), width)


def _is_called_from(file_name: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename).name != file_name:
        frame = frame.f_back
    return frame is not None


def _line_of_kernel() -> str:
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith((TRITON, HERE + "memory")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def main(script: str, *args: str) -> None:
    """Run a script as if it had been started itself; fails if a launch did, whoever caught it."""
    sys.argv = [script, *args]
    with Watch() as watch:
        runpy.run_path(script, run_name="__main__")
    if watch.faults:
        sys.exit("\n".join(watch.faults))


def _dot(original: Any, a: Any, b: Any, total: Any, *given: Any) -> Any:
    """A product whose bits do not depend on where a column is, as those of the host's BLAS may:
    added in float64 and rounded.
    """
    kinds = {a.data.dtype, b.data.dtype}
    if not kinds <= {np.dtype(np.float32), np.dtype(np.float16)} or total.data.dtype != np.float32:
        return original(a, b, total, *given)
    sums = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(sums + total.data, total.dtype.scalar)


if __name__ == "__main__":
    main(*sys.argv[1:])
