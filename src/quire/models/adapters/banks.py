"""The memory of a model's adapters: a bank for each product that adapters may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.adapters.weights import AdapterWeights, LowRank
from quire.models.cutting.leaf_part import part_of
from quire.models.cutting.sharding import LeafPart
from quire.models.loading.options import AdapterRoom
from quire.ops import Ops
from quire.ops.formats.lora import Bank, LoraPart, LoraPiece, LoraShape

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Product:
    """A product in a bank: of `count` products that share it, slot by slot, the one of this
    `number`; and the leaves that it consists of. `rows`: for each piece of the outputs, the rows of
    its leaf, -1 where an output has none; `change` makes the product's columns of a leaf's.
    `own`: what a worker of several has of each leaf.
    """

    bank: Bank
    count: int
    number: int
    leaves: tuple[str, ...]
    rows: tuple[Tensor, ...]
    change: Change | None
    own: tuple[LeafPart | None, ...]

    def place(self, slot: int) -> int:
        """Index of a slot, counted from 1, in the bank."""
        return (slot - 1) * self.count + self.number

    def parts(self, products: Mapping[str, LowRank]) -> list[LoraPart | None]:
        return [self._part(number, products.get(leaf)) for number, leaf in enumerate(self.leaves)]

    def _part(self, number: int, low: LowRank | None) -> LoraPart | None:
        if low is None:
            return None
        if self.bank.shape.is_table:  # whose inputs are the ids, which are the leaf's outputs
            return LoraPart(low.b.t(), (low.a.t(),))
        a, b = low.a, low.b
        if (own := self.own[number]) is not None:  # of B a worker has its outputs, of A its inputs
            a, b = (a, part_of(b, own)) if own.axis == 0 else (part_of(a, own), b)
        a = a if self.change is None else self.change(a)
        # for the row -1: outputs of no leaf, such as padding
        b = torch.cat((b, b.new_zeros(1, b.shape[1])))
        pieces = zip(self.bank.shape.pieces, self.rows, strict=True)
        return LoraPart(a, tuple(b[rows] for piece, rows in pieces if piece.part == number))


class AdapterBanks:
    """The banks of a model, and the slots of the rows that are computed now.

    Slots are numbered from 1, as in plans; in tensors of slots, as the ops have them, from 0.
    `slots` [T] int32 are those of the rows that the model is computing; None: no row has an
    adapter, and the products are those of a model without adapters.
    """

    def __init__(self, ops: Ops, room: AdapterRoom, device: torch.device) -> None:
        self.ops = ops
        self.room = room
        self.slots: Tensor | None = None
        self.device = device
        self._products: list[_Product] = []
        self._elsewhere: set[str] = set()

    @property
    def targets(self) -> frozenset[str]:
        """The leaves that adapters may change, without `.weight`; also those of other workers."""
        own = frozenset(leaf for product in self._products for leaf in product.leaves)
        leaves = own | self._elsewhere
        return leaves if self.room.leaves is None else leaves & self.room.leaves

    @property
    def nbytes(self) -> int:
        """The memory of the banks in bytes."""
        # several products of one shape share a bank
        return sum(bank_bytes(p.bank.shape) for p in self._products if p.number == 0)

    @contextmanager
    def rows_of(self, slots: Tensor | None) -> Iterator[None]:
        """Compute rows with these slots in the block, such as some of the model's."""
        before, self.slots = self.slots, slots
        try:
            yield
        finally:
            self.slots = before

    def add(
        self,
        leaves: Sequence[str],
        sizes: Sequence[int],
        in_features: int,
        *,
        segments: int = 1,
        parts: Sequence[LeafPart | None] | None = None,
        change_rows: Change | None = None,
        change_columns: Change | None = None,
        is_table: bool = False,
    ) -> Bank | None:
        """Allocate the bank of a product of leaves, one above the other, with `sizes` rows each.
        `parts`: what a worker of several has of each leaf; None: all. `in_features` are the
        product's, after `change_columns`. None: adapters may change none of the leaves.
        """
        pieces, rows = _pieces(sizes, change_rows)
        shape = in_features, pieces, segments
        return self._add([leaves], shape, rows, change_columns, parts, is_table=is_table)

    def add_stack(
        self,
        products: Sequence[Sequence[str]],
        sizes: Sequence[int],
        in_features: int,
        *,
        segments: int = 1,
    ) -> Bank | None:
        """Allocate one bank for several products of one shape, each of leaves as in `add`."""
        pieces, rows = _pieces(sizes, None)
        return self._add(products, (in_features, pieces, segments), rows, None, None)

    def _add(
        self,
        products: Sequence[Sequence[str]],
        shape: tuple[int, tuple[LoraPiece, ...], int],
        rows: tuple[Tensor, ...],
        change: Change | None,
        parts: Sequence[LeafPart | None] | None,
        *,
        is_table: bool = False,
    ) -> Bank | None:
        wanted, room = self.room.leaves, self.room
        if wanted is not None and all(wanted.isdisjoint(leaves) for leaves in products):
            return None
        count = len(products)
        slots = room.num_slots * count
        bank: Bank = self.ops.allocate_lora(
            LoraShape(*shape, slots, room.max_rank, room.dtype, self.device, is_table)
        )
        own = tuple(parts or [None] * len(products[0]))
        self._products += [
            _Product(bank, count, number, tuple(leaves), rows, change, own)
            for number, leaves in enumerate(products)
        ]
        return bank

    def add_elsewhere(self, leaves: Iterable[str]) -> None:
        """Let adapters change these leaves, which other workers have."""
        self._elsewhere.update(leaves)

    def add_other_stages(self, own: Iterable[str]) -> None:
        """Let adapters change other stages' leaves: all but the stage's `own` (with `.weight`)."""
        assert self.room.leaves is not None, "the leaves of the whole model are known"
        here = {name.removesuffix(".weight") for name in own}
        self._elsewhere.update(self.room.leaves - here)

    def load(self, slot: int, adapter: AdapterWeights) -> None:
        """Put an adapter into a slot, in place of the one there. It has been checked: ranks are
        within the room's, and its products are among `targets`.
        """
        for product in self._products:
            self.ops.load_lora(product.bank, product.place(slot), product.parts(adapter.products))


def bank_bytes(shape: LoraShape) -> int:
    """The memory of a bank's matrices in bytes."""
    of_rank = shape.num_parts * shape.in_features + shape.out_features
    return shape.num_slots * shape.max_rank * of_rank * shape.dtype.itemsize


def _pieces(
    sizes: Sequence[int], change: Change | None
) -> tuple[tuple[LoraPiece, ...], tuple[Tensor, ...]]:
    """The runs of outputs that come from one leaf, and the leaf's rows that they are. `change`
    moves rows, repeats them and adds zeros, which belong to the run before.
    """
    starts = torch.tensor([0, *sizes]).cumsum(0)
    # from 1 on: where a change fills up with zeros, it is seen
    given = torch.arange(1, int(starts[-1]) + 1)
    rows = (given if change is None else change(given)) - 1
    parts = torch.searchsorted(starts, rows, right=True) - 1
    parts = _filled(torch.where(rows < 0, -1, parts))
    borders = [0, *((parts[1:] != parts[:-1]).nonzero().squeeze(1) + 1).tolist(), len(parts)]
    pieces, own = [], []
    for start, end in zip(borders, borders[1:], strict=False):
        part = int(parts[start])
        pieces.append(LoraPiece(start, end - start, part))
        run = rows[start:end]
        own.append(torch.where(run < 0, -1, run - starts[part]))
    return tuple(pieces), tuple(own)


def _filled(parts: Tensor) -> Tensor:
    """Each -1 replaced by the entry before it."""
    at = torch.where(parts < 0, 0, torch.arange(len(parts)))
    return parts[at.cummax(0).values]
