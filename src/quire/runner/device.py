"""The device that a runner's tensors live on. Everything that differs between devices is here."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CpuDevice:
    """Host memory: arrays and tensors are views of each other, and nothing is in flight."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        """The array as a tensor of the device; on the CPU without a copy."""
        return torch.from_numpy(array)

    def array(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """A device tensor's values on the host, waiting for them; on the CPU without a copy."""
        return np.asarray(tensor.numpy())

    def take(
        self, table: Tensor, rows: np.ndarray[Any, Any], columns: np.ndarray[Any, Any], into: Tensor
    ) -> None:
        """into[i] = table[rows[i], columns[i]], converted; table and into are on the device."""
        into.numpy()[:] = table.numpy()[rows, columns]

    def put(
        self,
        table: Tensor,
        rows: np.ndarray[Any, Any],
        columns: np.ndarray[Any, Any],
        values: Tensor,
    ) -> None:
        """table[rows[i], columns[i]] = values[i], converted; table and values are on the device."""
        table.numpy()[rows, columns] = values.numpy()

    def return_free_memory(self) -> None:
        """Give what was freed back to the operating system: the C library may keep it otherwise."""
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):  # glibc; others return large pieces at once
            library.malloc_trim(0)
