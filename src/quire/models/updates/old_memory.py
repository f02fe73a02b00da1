"""The memory of a model whose weights are updated: new ones are packed into it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from quire.models.loading.model_parts import Part
from quire.models.loading.separate_products import SeparateLinear
from quire.models.updates.row_targets import RowWriter


class WeightWriter(Protocol):
    """A provider's way to new values for weights that it has packed."""

    looks_while_packing: bool
    """Whether `replacing` tells what it has seen."""

    def replacing(self, parts: Iterable[object]) -> AbstractContextManager[Callable[[], bool]]:
        """Weights that are packed meanwhile, in this order, are written into the memory of
        `parts`; one that has another form than its part gets memory of its own. Gives a function:
        whether all that was packed until now was looked at, and has no NaN.
        """
        ...

    def open_rows(self, part: object) -> RowWriter | None:
        """A writer of the rows of a packed weight, or of a tensor; None: the provider has none."""
        ...

    def look_at(self, tensor: Tensor, *, adds_up: bool) -> tuple[bool, tuple[int, ...]] | None:
        """Whether a tensor has NaN, and with `adds_up` also sums of it, by which different tensors
        differ except by chance. None: the provider does not look at such a tensor.
        """
        ...


class PlainWriter:
    """The writer of a provider without such a way: each weight gets memory of its own, and is
    copied.
    """

    looks_while_packing = False

    @contextmanager
    def replacing(self, parts: Iterable[object]) -> Iterator[Callable[[], bool]]:
        yield lambda: False

    def open_rows(self, part: object) -> RowWriter | None:
        return None

    def look_at(self, tensor: Tensor, *, adds_up: bool) -> tuple[bool, tuple[int, ...]] | None:
        return None


class OldMemory:
    """`PartMemory` of a model's parts for a piece of it of which some leaves have come: a part that
    has not come is built aside, and forgotten.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        writer: WeightWriter,
        have_come: Callable[[Sequence[str]], bool],
        before_write: Callable[[], None],
        check_again: Callable[[], None],
        by_rows: Collection[str],
    ) -> None:
        """have_come: whether all leaves of these names have come. before_write: called before
        anything is written. check_again: raises LoadError where tensors that were read while
        `looks` have NaN. by_rows: names of parts that are written by rows.
        """
        self._parts = parts
        self._writer = writer
        self._have_come = have_come
        self._before_write = before_write
        self._check_again = check_again
        self._by_rows = by_rows
        self.looks = False
        """Whether values that are packed now are looked at."""

    def find(self, name: str) -> Part | None:
        """See `PartMemory`."""
        return self._parts.get(name) if name in self._by_rows else None

    def tensor(self, name: str, leaves: Sequence[str]) -> Tensor | None:
        """See `PartMemory`."""
        old = self._parts.get(name)
        if not isinstance(old, Tensor) or not self._have_come(leaves):
            return None
        self._before_write()
        return old

    @contextmanager
    def packing(self, name: str, leaves: Sequence[str]) -> Iterator[None]:
        """See `PartMemory`."""
        old = self._parts.get(name)
        if old is None or not self._have_come(leaves):
            yield
            return
        self._before_write()
        parts = old.parts if isinstance(old, SeparateLinear) else (old,)
        with self._writer.replacing(parts) as is_clean:
            self.looks = self._writer.looks_while_packing
            try:
                yield
            finally:
                self.looks = False
            if self._writer.looks_while_packing and not is_clean():
                self._check_again()
