"""Workers in processes of one host exchange tensors through memory that they share.

The memory has no name: it is a file descriptor, which a process inherits or is sent, and it is
freed with the last process that has it. What happens in it is in csrc/core/exchange.hpp.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.errors import LoadError
from quire.hardware.native import find_native

_MOST_BYTES = 2 << 20
"""A tensor that is larger goes through in pieces of so many bytes, which stay in the caches between
being written and being read.
"""


class SharedExchange:
    """An exchange of `size` processes, as the process has it that opens and watches it.

    It is the one that hands the descriptor on, ends waits, and makes the exchange usable again. The
    ranks join with `SharedGroup(exchange.fileno(), rank)`.
    """

    def __init__(self, size: int, largest_bytes: int = _MOST_BYTES) -> None:
        """`largest_bytes`: of a tensor that a rank exchanges; larger ones go through as well.

        Raises LoadError where the system has no such memory.
        """
        native = _require_native()
        self.size = size
        try:
            self._fd: int = native.Exchange.open_region(size, min(largest_bytes, _MOST_BYTES))
            self._exchange = native.Exchange(self._fd, -1)
        except OSError as error:
            raise LoadError(f"The ranks get no memory for exchanges: {error}.") from error

    def fileno(self) -> int:
        """The descriptor of the memory, which other programs inherit only if they are told to."""
        return self._fd

    def abort(self, reason: str) -> None:
        """End the wait of all ranks, which then raise ExchangeAborted with the first reason."""
        self._exchange.abort(reason)

    @property
    def aborted(self) -> str:
        """The reason of the abort, "" without one. A rank that finds another one gone aborts."""
        return str(self._exchange.aborted)

    def reset(self) -> None:
        """Make the exchange usable again; no rank may be in a collective."""
        self._exchange.reset()

    def counts(self) -> list[int]:
        """Collectives that each rank has finished since the exchange was opened."""
        return list(self._exchange.counts())

    def waits(self) -> list[tuple[int, int]]:
        """Time that each rank has waited for others since the exchange was opened, in ns, and how
        often it slept meanwhile.
        """
        return list(self._exchange.waits())

    def close(self) -> None:
        """Close the descriptor. The memory lives as long as a process has it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SharedGroup:
    """One process's side of an exchange, used by one thread at a time. The calls of a `WorkerGroup`
    raise ExchangeAborted, now and until `SharedExchange.reset`, once somebody has aborted or a rank
    has died.
    """

    def __init__(self, memory: int, rank: int) -> None:
        """`memory`: the descriptor, which may be closed afterwards. A rank joins once.

        Raises ValueError for a descriptor of something else.
        """
        self._native = native = _require_native()
        self._exchange = native.Exchange(memory, rank)
        self._context = native.Context(native.Pool(1), native.best_level())
        self.rank, self.size = rank, int(self._exchange.size)

    def gather(self, x: Tensor, out: Tensor | None = None, *, to_first: bool = False) -> Tensor:
        if out is None or not out.is_contiguous():
            result = x.new_empty(len(x), self.size, *x.shape[1:])
            found = self.gather(x, result, to_first=to_first)
            return found if out is None else out.copy_(found)
        x = x if has_dense_rows(x) else x.contiguous()
        self.gather_by(self._context, x, out, to_first=to_first)
        return out

    def largest(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.dtype is not torch.float32 or (out is not None and not out.is_contiguous()):
            return torch.amax(self.gather(x), 1, out=out)  # type: ignore[no-any-return]
        found = torch.empty(x.shape) if out is None else out
        self.largest_by(self._context, x, found)
        return found

    def apply(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], width: int
    ) -> Tensor:
        return function(*inputs)

    def broadcast(self, x: Tensor) -> Tensor:
        found = x.contiguous() if self.rank == 0 else torch.empty(x.shape, dtype=x.dtype)
        self._exchange.broadcast(found.data_ptr(), found.nbytes)
        return found

    def abort(self, reason: str) -> None:
        """As `SharedExchange.abort`, for a rank that will not come to the next collective."""
        self._exchange.abort(reason)

    def rejoin(self, number: int) -> None:
        """Do nothing: whoever has made the `SharedExchange` resets it for all."""

    # as calls of a native context, which computes or records them

    def gather_by(self, context: Any, x: Tensor, out: Tensor, *, to_first: bool) -> None:
        """Gather x [T, *], with dense rows, into the dense `out`."""
        row_bytes = out[0, 0].nbytes if len(out) else 0
        stride = x.stride(0) * x.itemsize if x.dim() else 0
        context.gather(
            self._exchange, len(x), x.data_ptr(), stride, row_bytes, out.data_ptr(), to_first
        )

    def largest_by(self, context: Any, x: Tensor, out: Tensor) -> None:
        """Find the largest numbers of x [T], fp32, for the dense `out`."""
        context.largest(self._exchange, len(x), x.data_ptr(), x.stride(0), out.data_ptr())

    def board(self, *shape: int) -> Tensor:
        """Memory for fp32 numbers that all ranks see; each call gives the same memory, or a part of
        it. A rank reads what others have written after `meet_by` and before all meet again.
        """
        count = math.prod(shape)
        buffer = self._native.board(self._exchange, 4 * count)
        return torch.frombuffer(buffer, dtype=torch.float32).view(shape)

    def meet_by(self, context: Any) -> None:
        """Wait until all ranks have come."""
        context.meet(self._exchange)

    def has_room(self, width: int) -> bool:
        """Whether `product_by` has room for rows of so many numbers."""
        return 4 * width <= int(self._exchange.slot_bytes)

    def product_by(self, context: Any, x: Tensor, weight: Any, *args: Any) -> None:
        """Add up the workers' products with x [T, in]; the rest is native: the addresses of peaks,
        whether sums are whole numbers and rows are rounded, scales and bias, type and y.
        """
        at = x.data_ptr(), x.stride(0)
        context.shared_product(self._exchange, weight, len(x), *at, *args)


def has_dense_rows(x: Tensor) -> bool:
    """Whether the elements of each row x[i] lie side by side."""
    return len(x) == 0 or x[0].is_contiguous()


def _require_native() -> ModuleType:
    native, reason = find_native()
    if native is None:
        raise LoadError(f"Processes that share a model need native code, and {reason}.")
    return native
