"""The exchange between the workers of one model while a step runs.

A provider is anything with these methods: threads of one process (inproc_group.py), processes that
share memory (shared_group.py) or talk over a network (network_workers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


class ExchangeAborted(Exception):
    """Another worker failed in the step, so there is nothing to wait for."""


class WorkerGroup(Protocol):
    """The workers that share a model's heads and feed-forward width. Every call is made by all of
    them, in the same order, with tensors of the same shape and type.
    """

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of workers."""
        ...

    def gather(self, x: Tensor, out: Tensor | None = None, *, to_first: bool = False) -> Tensor:
        """The workers' tensors [T, *] in the order of the ranks -> [T, size, *], the same on each;
        `out`: where to write it. to_first: worker 0 alone reads it, and what others get may be
        anything.
        """
        ...

    def largest(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The largest of the workers' numbers [T] -> [T], NaN where one has NaN; as `gather`."""
        ...

    def apply(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], width: int
    ) -> Tensor:
        """function(*inputs), of inputs [T, *] -> [T, width], in the type of the first. It may look
        at values and exchange tensors, as no op does: where steps are recorded, it runs in each of
        them.
        """
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """The tensor of rank 0, on every worker, once all have come; it is not to be changed."""
        ...


@runtime_checkable
class ProductGroup(Protocol):
    """Workers that can put the parts of products where all read them."""

    def product(self, x: Tensor, weight: Any, peaks: Tensor | None) -> Tensor | None:
        """The sum of `linear_total` from the products of the workers' x [T, in] -> [T, out] in x's
        type, with the bits that `linear_partial` and `gather` would give it. None: it is to be done
        by these, on all workers.
        """
        ...

    def outputs(self, compute: Callable[[], Tensor], num_rows: int, width: int) -> Tensor | None:
        """The fp32 results [T, width] of the workers' compute(), which is a single op -> [T, size,
        width], as `gather` with to_first would give them. None: call that instead.
        """
        ...


class RankGroup(WorkerGroup, Protocol):
    """Workers that are processes of their own: one that fails ends the wait of the others."""

    def abort(self, reason: str) -> None:
        """End the wait of all, which raise ExchangeAborted, now and until the group is joined
        again.
        """
        ...

    def rejoin(self, number: int) -> None:
        """Make this side usable again after the `number`th abort of the group, counted from 1; no
        rank is in a collective. Nothing happens where it has rejoined so often already.
        """
        ...
