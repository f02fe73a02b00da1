"""The interface between a runner and the device of its tensors, and its implementation for CPUs.

Everything that differs between devices is hidden by this interface: the CPU here, devices with a
stream of their own in stream_device.py. A step's work is queued in order; its results are fetched
to the host, which waits only when it reads them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

Stage = Callable[[Array], Tensor]
"""`Device.stage`: sends a small array with the step's others; valid once the model has run."""

Send = Callable[[Array], Tensor]
"""`Device.send`: sends an array, which stays; nobody waits for it."""


class Fetched(Protocol):
    """Values on their way to the host."""

    def wait(self) -> list[Tensor]:
        """Wait for the values and return them in host memory. Raises EngineDeadError if the device
        has failed; may be called again.
        """
        ...


class Device(Protocol):
    """Place of tensors and of steps.

    The small arrays of a step go to the device together: `begin` opens a step with those that every
    step has, `stage` adds others, `flush` sends them. Steps that begin with arrays of the same
    shapes, and stage the same, find them at the same addresses.
    """

    torch: torch.device

    def places(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return the tensors on the device for a step that begins with arrays of these shapes."""
        ...

    def begin(self, arrays: Sequence[Array]) -> None:
        """Open a step with the contents of these arrays, which may change after `flush`."""
        ...

    def stage(self, array: Array) -> Tensor:
        """Stage an array; return its tensor on the device, valid from `flush` to the next step."""
        ...

    def flush(self) -> None:
        """Send what was staged and written since the last time."""
        ...

    def send(self, array: Array) -> Tensor:
        """Copy the array to a tensor on the device that lives as long as it is referenced. The copy
        is queued; the host does not wait.
        """
        ...

    def table(self, host: Array) -> Tensor:
        """Return a tensor with the values of `host` [N, W] that `write` keeps up to date; on a CPU
        it shares the memory of `host`.
        """
        ...

    def write(self, table: Tensor, row: int, first: int, values: Sequence[int]) -> None:
        """table[row, first:] = values, before the next step's work and after all queued work."""
        ...

    def take(self, table: Tensor, rows: Tensor, columns: Tensor, into: Tensor) -> None:
        """into[i] = table[rows[i], columns[i]], converted; all on the device."""
        ...

    def put(self, table: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
        """table[rows[i], columns[i]] = values[i], converted; all on the device."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Queue a copy of these tensors to the host, after all queued work. The tensors may be
        overwritten by work that is queued later.
        """
        ...

    def known(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values on the host if they are there already; None: they are still
        being computed, and only `Fetched.wait` waits.
        """
        ...

    def return_free_memory(self) -> None:
        """Give memory that was freed back to the system; nothing may be in flight."""
        ...


class _Here:
    """Values that are already on the host."""

    def __init__(self, values: list[Tensor]) -> None:
        self._values = values

    def wait(self) -> list[Tensor]:
        return self._values


class CpuDevice:
    """Host memory: arrays and tensors are views of each other, and nothing is in flight."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def places(self, arrays: Sequence[Array]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def begin(self, arrays: Sequence[Array]) -> None:
        """Do nothing: the arrays are read where they are."""

    def stage(self, array: Array) -> Tensor:
        return torch.from_numpy(array)

    def flush(self) -> None:
        """Do nothing: nothing has to be copied."""

    def send(self, array: Array) -> Tensor:
        return torch.from_numpy(array)

    def table(self, host: Array) -> Tensor:
        return torch.from_numpy(host)

    def write(self, table: Tensor, row: int, first: int, values: Sequence[int]) -> None:
        table.numpy()[row, first : first + len(values)] = values

    def take(self, table: Tensor, rows: Tensor, columns: Tensor, into: Tensor) -> None:
        into.numpy()[:] = table.numpy()[rows.numpy(), columns.numpy()]

    def put(self, table: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
        table.numpy()[rows.numpy(), columns.numpy()] = values.numpy()

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        return _Here(list(tensors))

    def known(self, tensor: Tensor) -> Tensor | None:
        return tensor

    def return_free_memory(self) -> None:
        """Have the C library return freed memory, which it may otherwise keep."""
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):  # glibc; others return large pieces at once
            library.malloc_trim(0)
