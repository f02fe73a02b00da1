"""Low-rank adapters of products: what the adapter of each row adds to it.

A product has a bank with the weights of some adapters, each in a slot. An adapter adds b @ (a @ x),
where x are the product's inputs. A product of several leaves (queries, keys and values) has as many
parts: each has matrices and a rank of its own. Sums are unrounded, in the order of
`quire.ops.segments`: a row's result depends on its own adapter alone, whatever the other rows and
slots hold and however many slots there are.

These ops belong to the format "linear": what `lora` returns is what the other ops of the provider
take as `addend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.ops.registry import WIDE, op
from quire.ops.segments import Addend, add_up, products

NO_ADAPTER = -1
"""The slot of a row without an adapter."""


@dataclass(frozen=True, slots=True)
class LoraPiece:
    """Outputs [start, start + size) of a product, to which an adapter's part `part` adds."""

    start: int
    size: int
    part: int


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Capacity of a bank: `num_slots` adapters of a product whose outputs are `pieces`, in
    order and without gaps. `segments` are those of the inputs. is_table: the inputs are ids of a
    table, of which a row has one.
    """

    in_features: int
    pieces: tuple[LoraPiece, ...]
    segments: int
    num_slots: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
    is_table: bool = False

    @property
    def num_parts(self) -> int:
        """The most pairs of matrices that an adapter has."""
        return 1 + max(piece.part for piece in self.pieces)

    @property
    def out_features(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def width(self) -> int:
        """The factors of a row: `max_rank` of each part."""
        return self.num_parts * self.max_rank


class Bank(Protocol):
    """The adapters of a product, opaque to all but the provider that allocated it."""

    @property
    def shape(self) -> LoraShape: ...


@dataclass(frozen=True, slots=True)
class PlainBank:
    """Plain torch's format: a [slots, parts, max_rank, in], or [slots, 1, in, max_rank] of a table;
    b [slots, max_rank, out], each output's column that of its own part; ranks [slots, parts] int32.
    What is beyond a rank is 0.
    """

    shape: LoraShape
    a: Tensor
    b: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class LoraPart:
    """A part of an adapter: a [r, in]; b [size, r] for each of the product's pieces that are of
    this part, in order.
    """

    a: Tensor
    b: tuple[Tensor, ...]


@op(format="linear", only_for="adapters")
def allocate_lora(shape: LoraShape) -> PlainBank:
    """An empty bank: no slot adds anything."""
    slots, parts, rank = shape.num_slots, shape.num_parts, shape.max_rank
    assert not shape.is_table or parts == 1, "a table has one part"
    inner = (shape.in_features, rank) if shape.is_table else (rank, shape.in_features)
    kind: Any = {"dtype": shape.dtype, "device": shape.device}
    return PlainBank(
        shape,
        torch.zeros(slots, parts, *inner, **kind),
        torch.zeros(slots, rank, shape.out_features, **kind),
        torch.zeros(slots, parts, dtype=torch.int32, device=shape.device),
    )


@op(mutates=("bank",), format="linear", only_for="adapters")
def load_lora(bank: PlainBank, slot: int, parts: Sequence[LoraPart | None]) -> None:
    """Replace a slot's adapter; a part of None adds nothing. No queued work may use the slot that
    the host does not wait for in order.
    """
    for tensor in (bank.a, bank.b, bank.ranks):
        tensor[slot] = 0
    for part, given in enumerate(parts):
        if given is None:
            continue
        rank = len(given.a)
        assert rank <= bank.shape.max_rank, "an adapter of a rank that the bank has no room for"
        bank.ranks[slot, part] = rank
        if bank.shape.is_table:
            bank.a[slot, 0, :, :rank] = given.a.t()
        else:
            bank.a[slot, part, :rank] = given.a
        own = (piece for piece in bank.shape.pieces if piece.part == part)
        for piece, b in zip(own, given.b, strict=True):
            bank.b[slot, :rank, piece.start : piece.start + piece.size] = b.t()


@op(format="linear", only_for="adapters")
def lora(x: Tensor, bank: PlainBank, slots: Tensor) -> Addend:
    """The adapters' addend to the product of x [T, in]; slots [T] int32, NO_ADAPTER or below
    for a row without.
    """
    return lora_total(lora_partial(x, bank, slots), bank, slots)


@op(format="linear", only_for="adapters")
def lora_partial(x: Tensor, bank: PlainBank, slots: Tensor) -> Tensor:
    """The factors a @ x of each segment of the inputs, [T, S, width] fp32, where x [T, in] has all
    of the inputs or, of several workers, a part of them.
    """
    wide = WIDE[x.dtype]
    factors = x.new_zeros((len(x), bank.shape.segments, bank.shape.width), dtype=wide)
    for slot in _used(slots):
        rows = _rows_of(slots, slot)
        a = bank.a[slot].flatten(0, 1).to(wide)
        factors[rows] = products(x[rows].to(wide), a, bank.shape.segments)
    return factors


@op(format="linear", only_for="adapters")
def lora_total(parts: Tensor, bank: PlainBank, slots: Tensor) -> Addend:
    """Result of `lora` from the segments' factors [T, S, width] of all workers, in the order of the
    inputs.
    """
    factors = add_up(parts).unflatten(1, (-1, bank.shape.max_rank))
    values = factors.new_zeros((len(parts), bank.shape.out_features))
    adds = torch.full_like(slots, NO_ADAPTER)
    for slot in _used(slots):
        if not bank.ranks[slot].any():
            continue
        rows = _rows_of(slots, slot)
        adds[rows] = rows.to(adds.dtype)
        for piece in bank.shape.pieces:
            outputs = slice(piece.start, piece.start + piece.size)
            b = bank.b[slot, :, outputs].to(values.dtype)
            values[rows, outputs] = factors[rows, piece.part] @ b
    return Addend(values, adds)


@op(format="linear", only_for="adapters")
def lora_embed(
    x: Tensor, ids: Tensor, bank: PlainBank, slots: Tensor, scale: float = 1.0
) -> Tensor:
    """x [T, C], the scaled rows of a table for ids [T], plus scale times what the rows' adapters
    add to the table.
    """
    y, wide = x.clone(), WIDE[x.dtype]
    for slot in _used(slots):
        if not bank.ranks[slot].any():
            continue
        rows = _rows_of(slots, slot)
        added = bank.a[slot, 0, ids[rows]].to(wide) @ bank.b[slot].to(wide)
        y[rows] = (x[rows].to(wide) + scale * added).to(x.dtype)
    return y


def _used(slots: Tensor) -> list[int]:
    """The slots of the rows, each once."""
    return [slot for slot in slots.unique().tolist() if slot >= 0]


def _rows_of(slots: Tensor, slot: int) -> Tensor:
    return (slots == slot).nonzero().squeeze(1)
