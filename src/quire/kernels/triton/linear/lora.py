"""Low-rank adapters: a row at a time, so that a row's bits are its own.

A row's program finds the matrices by the row's slot, so that one launch serves any mixture of
adapters, and a captured step any later one. No sum is padded to the largest rank: neither that nor
the number of slots is in a row's bits.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import columns_of, dense, kernel, power_of_2
from quire.ops.formats.lora import LoraPart, LoraShape, PlainBank, allocate_lora, load_lora
from quire.ops.segments import Addend, add_up

_RANKS = 8
"""Factors of a program, which share the row's inputs."""
_INPUTS = 512
_OUTPUTS = 256


@dataclass(frozen=True, slots=True)
class TritonBank:
    """Plain torch's format, and `tiles` [n, 3] int32 of the outputs: first, number, part."""

    plain: PlainBank
    tiles: Tensor

    @property
    def shape(self) -> LoraShape:
        return self.plain.shape


@kernel
def _shrink_kernel(
    x: tl.tensor,
    slots: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    factors: tl.tensor,
    IN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """factors [T, SEGMENTS, PARTS, MAX_RANK]: RANKS of them, of part program_id(1) // the programs
    of a part, for row program_id(0) and segment program_id(2), which has IN inputs;
    a [slots, PARTS, MAX_RANK, SEGMENTS * IN].
    """
    row = tl.program_id(0).to(tl.int64)
    per_part = (MAX_RANK + RANKS - 1) // RANKS
    part = tl.program_id(1) // per_part
    rank = (tl.program_id(1) % per_part) * RANKS + tl.arange(0, RANKS)
    slot = tl.load(slots + row).to(tl.int64)
    count = 0
    if slot >= 0:
        count = tl.load(ranks + slot * PARTS + part)
    if (tl.program_id(1) % per_part) * RANKS < count:
        total = tl.zeros((RANKS,), tl.float32)
        segment = tl.program_id(2)
        matrix = a + ((slot * PARTS + part) * MAX_RANK + rank)[:, None] * (SEGMENTS * IN)
        for start in range(0, IN, BLOCK):
            at = start + tl.arange(0, BLOCK)
            place = segment * IN + at
            inputs = tl.load(x + row * (SEGMENTS * IN) + place, at < IN, other=0.0).to(tl.float32)
            inside = (rank < count)[:, None] & (at < IN)[None, :]
            own = tl.load(matrix + place[None, :], inside, other=0.0).to(tl.float32)
            total += tl.sum(own * inputs[None, :], 1)
        into = factors + ((row * SEGMENTS + segment) * PARTS + part) * MAX_RANK
        tl.store(into + rank, total, rank < count)


@kernel
def _expand_kernel(
    factors: tl.tensor,
    slots: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    tiles: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """values [T, OUT]: tile program_id(1) of row program_id(0), of rows with an adapter; rows [T]:
    themselves, -1 where nothing is added. b [slots, MAX_RANK, OUT].
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tiles + tl.program_id(1) * 3
    first, size, part = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    slot = tl.load(slots + row).to(tl.int64)
    most = 0
    if slot >= 0:
        for other in tl.static_range(PARTS):
            most = tl.maximum(most, tl.load(ranks + slot * PARTS + other))
    # all programs of a row know it, and one says it
    if tl.program_id(1) == 0:
        tl.store(rows + row, tl.where(most > 0, row, -1).to(tl.int32))
    if most > 0:
        column = first + tl.arange(0, BLOCK)
        inside = tl.arange(0, BLOCK) < size
        total = tl.zeros((BLOCK,), tl.float32)
        own = factors + (row * PARTS + part) * MAX_RANK
        for rank in range(tl.load(ranks + slot * PARTS + part)):
            weight = tl.load(b + (slot * MAX_RANK + rank) * OUT + column, inside, other=0.0)
            total += tl.load(own + rank) * weight.to(tl.float32)
        tl.store(values + row * OUT + column, total, inside)


@kernel
def _embed_kernel(
    x: tl.tensor,
    ids: tl.tensor,
    slots: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    out: tl.tensor,
    scale: float,
    rows: int,
    C: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out [T, C] = x + scale * b [slots, MAX_RANK, C] times row ids[t] of a [slots, rows,
    MAX_RANK]: columns program_id(1) of row program_id(0).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    value = tl.load(x + row * C + column, inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        total = tl.zeros((BLOCK,), tl.float32)
        own = a + (slot * rows + tl.load(ids + row)) * MAX_RANK
        for rank in range(tl.load(ranks + slot)):
            weight = tl.load(b + (slot * MAX_RANK + rank) * C + column, inside, other=0.0)
            total += tl.load(own + rank).to(tl.float32) * weight.to(tl.float32)
        value += scale * total
    tl.store(out + row * C + column, value.to(out.dtype.element_ty), inside)


def allocate(shape: LoraShape) -> TritonBank:
    """See `quire.ops.formats.lora.allocate_lora`."""
    tiles = [
        (first, min(_OUTPUTS, piece.start + piece.size - first), piece.part)
        for piece in shape.pieces
        for first in range(piece.start, piece.start + piece.size, _OUTPUTS)
    ]
    on_device = torch.tensor(tiles, dtype=torch.int32, device=shape.device)
    return TritonBank(allocate_lora(shape), on_device)


def load(bank: TritonBank, slot: int, parts: Sequence[LoraPart | None]) -> None:
    """See `quire.ops.formats.lora.load_lora`."""
    load_lora(bank.plain, slot, parts)


def addend(x: Tensor, bank: TritonBank, slots: Tensor) -> Addend:
    """See `quire.ops.formats.lora.lora`."""
    return total(partial(x, bank, slots), bank, slots)


def partial(x: Tensor, bank: TritonBank, slots: Tensor) -> Tensor:
    """See `quire.ops.formats.lora.lora_partial`."""
    shape, plain = bank.shape, bank.plain
    x, slots, segments = dense(x), dense(slots), shape.segments
    factors = x.new_empty(len(x), segments, shape.width, dtype=torch.float32)
    if len(x):
        inputs = shape.in_features // segments
        programs = shape.num_parts * -(-shape.max_rank // _RANKS)
        _shrink_kernel[(len(x), programs, segments)](
            *(x, slots, plain.a, plain.ranks, factors),
            IN=inputs,
            SEGMENTS=segments,
            PARTS=shape.num_parts,
            MAX_RANK=shape.max_rank,
            RANKS=_RANKS,
            BLOCK=min(_INPUTS, power_of_2(inputs)),
        )
    return factors


def total(parts: Tensor, bank: TritonBank, slots: Tensor) -> Addend:
    """See `quire.ops.formats.lora.lora_total`."""
    shape, plain = bank.shape, bank.plain
    factors, slots = add_up(parts).contiguous(), dense(slots)
    values = factors.new_empty(len(parts), shape.out_features)
    rows = torch.empty(len(parts), dtype=torch.int32, device=parts.device)
    if len(parts):
        _expand_kernel[(len(parts), len(bank.tiles))](
            *(factors, slots, plain.b, plain.ranks, bank.tiles, values, rows),
            OUT=shape.out_features,
            PARTS=shape.num_parts,
            MAX_RANK=shape.max_rank,
            BLOCK=min(_OUTPUTS, power_of_2(max(piece.size for piece in shape.pieces))),
        )
    return Addend(values, rows)


def embed(x: Tensor, ids: Tensor, bank: TritonBank, slots: Tensor, scale: float = 1.0) -> Tensor:
    """See `quire.ops.formats.lora.lora_embed`."""
    shape, plain = bank.shape, bank.plain
    x, ids, slots = dense(x), dense(ids), dense(slots)
    out = torch.empty_like(x)
    if out.numel():
        blocks, block = columns_of(x.shape[1])
        _embed_kernel[(len(x), blocks)](
            *(x, ids, slots, plain.a, plain.b, plain.ranks, out, scale, shape.in_features),
            C=x.shape[1],
            MAX_RANK=shape.max_rank,
            BLOCK=block,
        )
    return out
