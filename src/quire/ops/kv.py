"""KV memory of one layer: allocation, and moving whole blocks in and out.

The layout belongs to the provider; all ops that touch it share the format "kv". Code that moves
blocks (offload, sleep, transfer) uses the neutral form [n, 2, S, K, D], keys then values.

Layers of different KV groups may have one piece of memory in common, since a block belongs to one
group at a time: `allocate_shared_kv` lays it out for each. Where their blocks are not equally
large, a page of the memory, which holds one block, is as large as the largest.

Two types of KV memory have a byte for each number: int8, whole numbers of -127..127, and e4m3,
floats of up to 448. Every key and every value of a head has one fp32 scale of its own, which makes
the largest magnitude the largest number (`quantize_rows`, `fp8_rows`). A scale per token and head
is written with the token and never again, so that a slot's bytes depend on nothing but its token;
one per block would change with every token of the block. It costs 4 of D + 4 bytes. The neutral
form then has the memory's type, [n, 2, S, K, D + 4], the scale's bytes at the end: nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from quire.ops.fp8 import FP8, LARGEST, fp8_rows
from quire.ops.quantized import quantize_rows
from quire.ops.registry import op

BlockIds = Sequence[int] | Tensor
"""Block ids, each in 0..N-1 and no id twice."""

LARGEST_NUMBER = {torch.int8: 127.0, FP8: LARGEST}
"""Types of memory in which each key and each value has a scale -> the number that its largest
magnitude becomes."""

FixedScales = tuple[float, float]
"""Scales of a layer's keys and of its values, fp32."""

SCALE_BYTES = 4
"""Bytes of the scale of a key or a value."""


class Blocks(Protocol):
    """Memory of blocks."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Views [N, ...] of all that blocks hold, in types that all of torch's indexing knows."""
        ...


class LayerKV(Blocks, Protocol):
    """One layer's KV memory; slots that were never written have arbitrary contents, even NaN."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's recurrent states, a state per block: `data` [N, B] uint8, whose rows begin at
    multiples of 64 bytes from the first. Contents are arbitrary until they are written.
    """

    data: Tensor

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.data,)

    def view(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The numbers [N, *shape] that begin at byte `start` of every block."""
        part = self.data[:, start : start + math.prod(shape) * dtype.itemsize]
        return part.view(dtype).unflatten(1, tuple(shape))


@dataclass(frozen=True, slots=True)
class LayerLatents:
    """One layer's latents: `data` [N, S, r + R], with each token's normed latent, then its rotated
    key; where tokens are chosen by keys of their own, those are `keys` [N, S, I]. Contents are
    arbitrary until they are written. All providers have this layout.
    """

    data: Tensor
    rank: int
    keys: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        return self.data.shape[1]

    @property
    def width(self) -> int:
        """r + R."""
        return self.data.shape[2]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.data,) if self.keys is None else (self.data, self.keys)


@dataclass(frozen=True, slots=True)
class KVShape:
    """A block of keys and values: S tokens of K heads of D numbers."""

    block_size: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """A block that holds a state of `num_bytes` bytes."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class LatentShape:
    """A block of latents: S tokens of `rank` r + `rotated` R numbers, then S tokens' keys of
    `index_dim` I numbers.
    """

    block_size: int
    rank: int
    rotated: int
    index_dim: int = 0


PlainShape = StateShape | LatentShape
"""Blocks that look the same whoever provides their memory."""

PlainMemory = LayerState | LayerLatents
BlockShape = KVShape | PlainShape
BlockMemory = LayerKV | PlainMemory
Memory = TypeVar("Memory", bound=Blocks)


@dataclass(frozen=True, slots=True)
class PlainKV:
    """Plain torch's layout: one lane per slot that holds the keys, then the values of all heads.

    `lanes` is [1 + N*Q + 1, 2, K, D], where Q = `page_lanes` is S, or more where blocks of another
    shape in the same memory are larger:

    | lane                 | what it is for                                                       |
    | -------------------- | -------------------------------------------------------------------- |
    | 0                    | zeros for ever: what a padded lane of a gather reads, against NaN    |
    | 1 + block * Q + i    | the keys and values of token i of that block                         |
    | last                 | written for PAD_SLOT (-1 counts from the end of `slots`), never read |

    `scales` [1 + N*Q + 1, 2, K] fp32 belong to lanes in a type of `LARGEST_NUMBER`.
    """

    lanes: Tensor
    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    slots: Tensor
    keys: Tensor
    values: Tensor
    page_lanes: int
    scales: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.lanes.dtype

    @property
    def parts(self) -> tuple[Tensor, ...]:
        numbers = movable(self.blocks)
        return (numbers,) if self.scales is None else (numbers, self.block_scales)

    @property
    def blocks(self) -> Tensor:
        """[N, S, 2, K, D], a view."""
        return self._blocks(self.lanes)

    @property
    def block_scales(self) -> Tensor:
        """[N, S, 2, K] fp32 of memory with scales, a view."""
        assert self.scales is not None
        return self._blocks(self.scales)

    def _blocks(self, lanes: Tensor) -> Tensor:
        n, q = self.num_blocks, self.page_lanes
        return lanes[1 : 1 + n * q].view(n, q, *lanes.shape[1:])[:, : self.block_size]

    def _places(self, slots: Tensor) -> Tensor:
        """Slots, or PAD_SLOT, as places in `slots`: the same, unless pages have unused lanes."""
        size, apart = self.block_size, self.page_lanes - self.block_size
        # PAD_SLOT stays -1
        return slots if apart == 0 else slots + (slots.clamp(min=0) // size) * apart

    @property
    def k(self) -> Tensor:
        """Keys [N, S, K, D], a view."""
        return self.blocks[:, :, 0]

    @property
    def v(self) -> Tensor:
        """Values [N, S, K, D], a view."""
        return self.blocks[:, :, 1]

    def write(
        self, slots: Tensor, keys: Tensor, values: Tensor, fixed: FixedScales | None = None
    ) -> None:
        """Store keys and values [T, K, D] of any float dtype in slots [T]; fixed: see
        `rope_store`.
        """
        index = (self._places(slots),)
        if self.scales is None:
            self.keys.index_put_(index, keys)
            self.values.index_put_(index, values)
            return
        both = torch.stack((keys, values), 1)
        if fixed is not None and self.dtype is FP8:
            numbers, scales = _with_fixed_scales(both, fixed)
        else:
            numbers, scales = quantized_kv(both, self.dtype)
        movable(self.slots).index_put_(index, movable(numbers))
        self.scales[1:].index_put_(index, scales)

    def read(self, lanes: Tensor, dtype: torch.dtype) -> Tensor:
        """[M, 2, K, D] of the slots lanes - 1 [M], zeros for lane 0: as they are stored, or, of
        memory with scales, in `dtype`.
        """
        if self.page_lanes != self.block_size:
            lanes = self._places(lanes - 1) + 1
        if self.scales is None:
            return self.lanes.index_select(0, lanes)
        stored = movable(self.lanes).index_select(0, lanes).view(self.dtype)
        scales = self.scales.index_select(0, lanes).to(dtype).unsqueeze(-1)
        return stored.to(dtype) * scales


def movable(data: Tensor) -> Tensor:
    """The same memory in a type that all of torch's indexing knows: floats of a byte as bytes."""
    return data.view(torch.uint8) if data.dtype is FP8 else data


def quantized_kv(data: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys or values [*, D] of any float dtype -> numbers [*, D] of `dtype`, one with scales, and
    fp32 scales [*]; a vector with a NaN or an infinity has the scale NaN.
    """
    if dtype is FP8:
        numbers, scales = fp8_rows(data)
    else:
        numbers, scales = quantize_rows(data.float())
        numbers = numbers.nan_to_num(0).to(dtype)
    return numbers, scales.squeeze(-1)


def _with_fixed_scales(both: Tensor, fixed: FixedScales) -> tuple[Tensor, Tensor]:
    """Keys and values [T, 2, K, D] -> e4m3 [T, 2, K, D] and fp32 scales [T, 2, K], as
    `quantized_kv` gives them.
    """
    wide, scales = both.float(), torch.tensor(fixed, device=both.device).view(2, 1, 1)
    numbers = (wide / scales).nan_to_num(0.0, LARGEST, -LARGEST).clamp(-LARGEST, LARGEST)
    # 0, or NaN where the vector has a NaN or an infinity
    return numbers.to(FP8), scales.squeeze(-1) + (wide * 0).sum(-1)


def numbers_and_scales(data: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers [*, D] of `dtype`, one with scales, and fp32 scales [*] of blocks in the neutral form
    of that type or of any float type without scales.
    """
    if data.dtype is not dtype:
        return quantized_kv(data, dtype)
    scales = data[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return data[..., :-SCALE_BYTES], scales.squeeze(-1)


def with_scales(numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers [*, D] and fp32 scales [*] as one tensor [*, D + 4] of the numbers' type."""
    scale_bytes = scales.contiguous().unsqueeze(-1).view(torch.uint8)
    return torch.cat((numbers.view(torch.uint8), scale_bytes), -1).view(numbers.dtype)


@op(format="kv", binds=("device",))
def allocate_kv(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
) -> PlainKV:
    """KV memory of one layer for num_blocks blocks of block_size tokens. Block 0 has zeros: padding
    reads it, and must not find NaN. The contents of the others are arbitrary.
    """
    # lane 0 has zeros for padding to read, and PAD_SLOT, which is -1, leads to the last lane
    shape = (num_blocks * block_size + 2, 2, kv_heads, head_dim)
    lanes = torch.empty(shape, dtype=dtype, device=device)
    return with_null_block(_plain_kv(lanes, num_blocks, block_size, page_lanes=block_size))


def with_null_block(kv: Memory) -> Memory:
    """New memory, with zeros in block 0."""
    for part in kv.parts:
        part[:1].zero_()
    return kv


def _plain_kv(lanes: Tensor, num_blocks: int, block_size: int, *, page_lanes: int) -> PlainKV:
    """The layout over lanes [1 + N*Q + 1, 2, K, D], with scales of its own."""
    _, _, kv_heads, head_dim = lanes.shape
    lanes[0].zero_()
    slots = lanes[1:]
    scales = None
    if lanes.dtype in LARGEST_NUMBER:
        scales = torch.empty(lanes.shape[:3], device=lanes.device)
        scales[0].zero_()
    return PlainKV(
        lanes,
        num_blocks,
        block_size,
        kv_heads,
        head_dim,
        slots,
        slots[:, 0],
        slots[:, 1],
        page_lanes=page_lanes,
        scales=scales,
    )


@op(format="kv", binds=("device",))
def allocate_shared_kv(
    num_blocks: int, shapes: Sequence[BlockShape], dtype: torch.dtype, *, device: torch.device
) -> tuple[PlainKV | PlainMemory, ...]:
    """Memory of num_blocks blocks, each of which holds a block of one of `shapes` at a time: a view
    of it for each, in order. What is written through one is arbitrary through the others. Block 0
    has zeros, as in `allocate_kv`.
    """
    lanes = [_lane_bytes(shape, dtype) for shape in shapes if isinstance(shape, KVShape)]
    page = page_bytes([_lanes_bytes(shape, dtype) for shape in shapes], lanes)
    guard = page_bytes(lanes or [0])  # lane 0 of every shape, and the last lane
    memory = torch.empty(guard + num_blocks * page + guard, dtype=torch.uint8, device=device)
    pages = memory[guard : guard + num_blocks * page].view(num_blocks, page)

    def view(shape: BlockShape) -> PlainKV | PlainMemory:
        if not isinstance(shape, KVShape):
            return plain_memory(pages, shape, dtype)
        size = _lane_bytes(shape, dtype)
        own = memory[guard - size : guard + num_blocks * page + size]
        lanes = own.view(dtype).view(-1, 2, shape.kv_heads, shape.head_dim)
        return _plain_kv(lanes, num_blocks, shape.block_size, page_lanes=page // size)

    return tuple(with_null_block(view(shape)) for shape in shapes)


def plain_bytes(shape: PlainShape, dtype: torch.dtype) -> int:
    """The size of a block; latents are of type `dtype`."""
    if isinstance(shape, StateShape):
        return shape.num_bytes
    assert dtype not in LARGEST_NUMBER, "latents have no scales"
    width = shape.rank + shape.rotated + shape.index_dim
    return shape.block_size * width * dtype.itemsize


def plain_memory(pages: Tensor, shape: PlainShape, dtype: torch.dtype) -> PlainMemory:
    """Blocks of this shape in pages [N, B] uint8, a view; latents are of type `dtype`."""
    part = pages[:, : plain_bytes(shape, dtype)]
    if isinstance(shape, StateShape):
        return LayerState(part)
    size, width = shape.block_size, shape.rank + shape.rotated
    numbers = part.view(dtype)
    data = numbers[:, : size * width].unflatten(1, (size, width))
    if not shape.index_dim:
        return LayerLatents(data, shape.rank)
    keys = numbers[:, size * width :].unflatten(1, (size, shape.index_dim))
    return LayerLatents(data, shape.rank, keys)


def page_bytes(sizes: Sequence[int], multiples: Sequence[int] = ()) -> int:
    """The size of pages for blocks of these sizes: a multiple of a cache line and of each of
    `multiples`.
    """
    unit = math.lcm(64, *multiples)
    return -(-max(sizes) // unit) * unit


def _lane_bytes(shape: KVShape, dtype: torch.dtype) -> int:
    return 2 * shape.kv_heads * shape.head_dim * dtype.itemsize


def _lanes_bytes(shape: BlockShape, dtype: torch.dtype) -> int:
    """A block without scales."""
    if isinstance(shape, KVShape):
        return shape.block_size * _lane_bytes(shape, dtype)
    return plain_bytes(shape, dtype)


def ids_on(block_ids: BlockIds, device: torch.device) -> Tensor:
    """Block ids as an index of tensors on `device`."""
    if isinstance(block_ids, Tensor):
        return block_ids.to(device, torch.int64)
    return torch.tensor(block_ids, dtype=torch.int64, device=device)


@op(format="kv")
def export_kv(kv: PlainKV, block_ids: BlockIds) -> Tensor:
    """A copy of the blocks in the neutral form [n, 2, S, K, D], in the order of block_ids; of
    memory with scales [n, 2, S, K, D + 4].
    """
    ids = ids_on(block_ids, kv.lanes.device)
    data = movable(kv.blocks).index_select(0, ids).transpose(1, 2).contiguous().view(kv.dtype)
    if kv.scales is None:
        return data
    return with_scales(data, kv.block_scales.index_select(0, ids).transpose(1, 2))


@op(mutates=("kv",), format="kv")
def import_kv(kv: PlainKV, block_ids: BlockIds, data: Tensor) -> None:
    """Write data [n, 2, S, K, D] (any float dtype, any device) into the blocks; memory with scales
    also takes what it exports.
    """
    ids = ids_on(block_ids, kv.lanes.device)
    data = data.to(kv.lanes.device)
    if kv.scales is None:
        data = data.to(kv.dtype)
    else:
        data, scales = numbers_and_scales(data, kv.dtype)
        kv.block_scales.index_copy_(0, ids, scales.transpose(1, 2))
    movable(kv.blocks).index_copy_(0, ids, movable(data).transpose(1, 2))


@op(mutates=("kv",), format="kv")
def copy_kv(kv: BlockMemory, src_ids: BlockIds, dst_ids: BlockIds) -> None:
    """Copy block src_ids[i] to dst_ids[i]; all are read before the first is written."""
    for part in kv.parts:
        source, target = (ids_on(ids, part.device) for ids in (src_ids, dst_ids))
        part.index_copy_(0, target, part.index_select(0, source))


@op(mutates=("kv",), format="kv")
def zero_kv(kv: BlockMemory, block_ids: BlockIds) -> None:
    """Fill the blocks with zeros."""
    for part in kv.parts:
        part.index_fill_(0, ids_on(block_ids, part.device), 0)
