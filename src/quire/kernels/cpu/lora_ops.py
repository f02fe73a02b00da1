"""The native ops of low-rank adapters: factors here, what they become where a product's sums are
finished (csrc/kernels/lora.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cpu.row_arguments import address_of, rows_at
from quire.kernels.cpu.runtime import CpuRuntime, NativeOps, huge_tensor
from quire.ops.formats.lora import LoraPart, LoraShape
from quire.ops.segments import Addend, add_up


@dataclass(frozen=True, slots=True)
class CpuBank:
    """a [slots, parts, max_rank, in], or [slots, 1, in, max_rank] of a table; b [slots, *]: blocks
    of outputs (csrc/kernels/kernels.hpp); ranks [slots, parts] int32; `first_blocks` of the pieces.
    """

    shape: LoraShape
    native: Any
    a: Tensor
    b: Tensor
    ranks: Tensor
    pieces: Tensor
    first_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CpuLora:
    """The factors [T, width] of a step's rows, and which slot's adapter adds to each row [T]."""

    bank: CpuBank
    factors: Tensor
    slots: Tensor


class LoraOps(NativeOps):
    """Banks of adapters and products with them; see quire.ops.formats.lora for each."""

    def __init__(self, runtime: CpuRuntime) -> None:
        super().__init__(runtime)
        self._block = runtime.native.lora_block

    def allocate_lora(self, shape: LoraShape) -> CpuBank:
        """Pages take no memory before an adapter is in them."""
        slots, parts, rank = shape.num_slots, shape.num_parts, shape.max_rank
        first_blocks, blocks = [], 0
        for piece in shape.pieces:
            first_blocks.append(blocks)
            blocks += -(-piece.size // self._block)
        pieces = torch.tensor(
            [
                (piece.start, piece.size, piece.part, first)
                for piece, first in zip(shape.pieces, first_blocks, strict=True)
            ],
            dtype=torch.int64,
        )
        inner = (shape.in_features, rank) if shape.is_table else (rank, shape.in_features)
        a = huge_tensor((slots, parts, *inner), shape.dtype)
        b = huge_tensor((slots, blocks * rank * self._block), shape.dtype)
        ranks = torch.zeros(slots, parts, dtype=torch.int32)
        native = self._native.LoraBank(
            self._types[shape.dtype],
            shape.in_features,
            shape.segments,
            parts,
            rank,
            blocks,
            *(tensor.data_ptr() for tensor in (a, b, ranks, pieces)),
            len(pieces),
        )
        return CpuBank(shape, native, a, b, ranks, pieces, tuple(first_blocks))

    def load_lora(self, bank: CpuBank, slot: int, parts: Sequence[LoraPart | None]) -> None:
        """Only what the ranks cover is ever read, so that nothing else has to be cleared."""
        bank.ranks[slot] = 0
        for number, part in enumerate(parts):
            if part is None:
                continue
            rank = len(part.a)
            assert rank <= bank.shape.max_rank, "an adapter of a rank that the bank has no room for"
            if bank.shape.is_table:
                bank.a[slot, 0, :, :rank] = part.a.t()
            else:
                bank.a[slot, number, :rank] = part.a
            left = iter(part.b)
            for piece, first in zip(bank.shape.pieces, bank.first_blocks, strict=True):
                if piece.part == number:
                    start = first * bank.shape.max_rank * self._block
                    blocks = self._in_blocks(next(left))
                    bank.b[slot, start : start + len(blocks)] = blocks
            bank.ranks[slot, number] = rank

    def _in_blocks(self, b: Tensor) -> Tensor:
        """b [size, r] -> [blocks * r * outputs of a block]."""
        padded = F.pad(b, (0, 0, 0, -len(b) % self._block))
        return padded.unflatten(0, (-1, self._block)).transpose(1, 2).flatten()

    def lora(self, x: Tensor, bank: CpuBank, slots: Tensor) -> CpuLora:
        """x [T, in], slots [T]; a row whose adapter leaves the product alone has no slot."""
        factors, used = self._shrink(x, bank, slots, is_partial=False)
        return CpuLora(bank, factors, used)

    def lora_partial(self, x: Tensor, bank: CpuBank, slots: Tensor) -> Tensor:
        """x [T, in] -> [T, S, width]; what is beyond the ranks is arbitrary."""
        return self._shrink(x, bank, slots, is_partial=True)[0]

    def lora_total(self, parts: Tensor, bank: CpuBank, slots: Tensor) -> Addend:
        """parts [T, S, width] of all workers; steps of several are not recorded."""
        assert self._runtime.program is None
        factors = add_up(parts).contiguous()
        values = torch.empty(len(parts), bank.shape.out_features)
        has_ranks = bank.ranks.any(1)[slots.clamp_min(0).long()] & (slots >= 0)
        rows = torch.arange(len(slots), dtype=torch.int32).where(has_ranks, -1)
        used = slots.where(has_ranks, -1)
        self._context.lora_expand(
            bank.native,
            len(parts),
            factors.data_ptr(),
            used.data_ptr(),
            values.shape[1],
            values.data_ptr(),
        )
        return Addend(values, rows)

    def lora_embed(
        self, x: Tensor, ids: Tensor, bank: CpuBank, slots: Tensor, scale: float = 1.0
    ) -> Tensor:
        """x [T, C], ids [T] -> [T, C]."""
        runtime = self._runtime
        x, ids = runtime.dense(x), runtime.dense(ids)
        runtime.keep(len(x), x, ids, slots, *bank_tensors(bank))
        out = runtime.output(x.shape, x.dtype)
        self._context.lora_embed(
            bank.native,
            self._types[x.dtype],
            *x.shape,
            scale,
            *rows_at(x),
            *map(address_of, (ids, slots, out)),
        )
        return out

    def _shrink(
        self, x: Tensor, bank: CpuBank, slots: Tensor, *, is_partial: bool
    ) -> tuple[Tensor, Tensor]:
        runtime, shape = self._runtime, bank.shape
        assert x.shape[1] == shape.in_features and slots.dtype is torch.int32
        assert len(slots) == len(x) and not shape.is_table
        x, num_tokens = runtime.dense(x), len(x)
        kept = (shape.segments,) if is_partial else ()
        runtime.keep(num_tokens, x, slots, *bank_tensors(bank))
        factors = runtime.output((num_tokens, *kept, shape.width), torch.float32)
        used = runtime.output((num_tokens,), torch.int32)
        self._context.lora_shrink(
            bank.native,
            self._types[x.dtype],
            num_tokens,
            *rows_at(x),
            *map(address_of, (slots, factors, used)),
            is_partial,
        )
        return factors, used


def bank_tensors(bank: CpuBank) -> tuple[Tensor, ...]:
    """Tensors that products with the bank read."""
    return bank.a, bank.b, bank.ranks, bank.pieces
