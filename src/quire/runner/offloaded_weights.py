"""Weights that do not fit on a device: they stay in pinned memory of the host, and each pass copies
a layer's into a buffer on the device before the layer runs.

There are a few buffers, at fixed addresses. The k-th offloaded layer uses buffer k modulo their
number: its copy starts as soon as the layer that had the buffer is queued, and what is between the
two runs meanwhile. A pass starts the first copies itself and waits for every copy that it starts,
so it depends on no other pass: it can fail and be run again, or be captured in a graph with its
copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.kv_pool_size import gib
from quire.errors import LoadError
from quire.models.loading.model_parts import Part, tensors_within
from quire.models.loading.products import is_chosen, product_of
from quire.models.loading.weight_placement import RunnableLayer
from quire.ops import Batch
from quire.runner.devices.arena import ALIGNMENT, Driver
from quire.runner.devices.copy_queue import Arrival

logger = logging.getLogger(__name__)

_PIECE_BYTES = 32 << 20
"""Bytes of one allocation of pinned memory: torch rounds each up to a power of two."""


class OffloadedWeights:
    """A `WeightPlacement` that keeps the weights of products of some layers on the host. Norms and
    other tensors that are used outside of products stay on the device: they are small, and a
    layer's end reads the next one's norm.

    Invariant: between the start of the copy for the k-th offloaded layer and its `join`, nothing
    that is queued reads the buffer k modulo `num_buffers`.
    """

    def __init__(
        self, driver: Driver, layers: Sequence[int], num_buffers: int, names: Sequence[str] = ()
    ) -> None:
        """`layers` are their numbers, ascending; `names`, those of their products
        (loading/products.py); none: all.
        """
        self._driver = driver
        self._layers = tuple(layers)
        self._num_buffers = num_buffers
        self._names = tuple(names)
        self._stored: list[_StoredLayer] = []
        self._copies: list[list[tuple[Tensor, Tensor]]] = []
        self._queue = driver.copy_queue()
        self._coming: dict[int, Arrival] = {}

    def place(self, layer: int, parts: Sequence[tuple[str, Part]]) -> None:
        if layer not in self._layers:
            return
        tensors = [
            tensor
            for name, part in parts
            if not isinstance(part, Tensor) and is_chosen(product_of(name), self._names)
            for tensor in tensors_within(part)
        ]
        if not tensors:
            raise LoadError(f"Layer {layer} has no weights that could be offloaded.")
        self._stored.append(_StoredLayer.of(tensors, self._driver))

    def finish(self, layers: Sequence[RunnableLayer]) -> Sequence[RunnableLayer]:
        """Give the weights their places in the buffers."""
        assert len(self._stored) == len(self._layers), "an offloaded layer was not made"
        self._driver.return_free_memory()  # what they had on the device while they were made
        sizes = [
            max(stored.num_bytes for stored in self._stored[i :: self._num_buffers])
            for i in range(self._num_buffers)
        ]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self._driver.torch)
        buffers = memory.split(sizes)
        for k, stored in enumerate(self._stored):
            self._copies.append(stored.move_to(buffers[k % self._num_buffers]))
        logger.info(
            "Weights of %d of %d layers are offloaded: %s are in pinned host memory, and each step "
            "copies them through buffers of %s on the device.",
            *(len(self._stored), len(layers)),
            *(gib(sum(stored.num_bytes for stored in self._stored)), gib(sum(sizes))),
        )
        return [self._around(i, layer) for i, layer in enumerate(layers)]

    def _around(self, number: int, layer: RunnableLayer) -> RunnableLayer:
        place = self._layers.index(number) if number in self._layers else None
        if place is None and number > 0:
            return layer
        return _Surrounded(self, layer, place, is_first=number == 0)

    def begin(self) -> None:
        """Begin a pass: start the copies for the first layers."""
        self._coming.clear()  # a pass that failed may have left some
        for place in range(self._num_buffers):
            self._start(place)

    def fetch(self, place: int) -> None:
        """Let the work that follows have the weights of the place-th offloaded layer."""
        if place not in self._coming:  # a pass that began behind the first layer
            self._start(place)
        self._coming.pop(place).join()

    def release(self, place: int) -> None:
        """The work that is queued so far is the last that reads these weights in this pass."""
        following = place + self._num_buffers
        if following < len(self._copies):
            self._start(following)

    def _start(self, place: int) -> None:
        for other in [o for o in self._coming if (o - place) % self._num_buffers == 0]:
            del self._coming[other]  # what it brought is overwritten
        self._coming[place] = self._queue.start(self._copies[place])


@dataclass(frozen=True, slots=True)
class _Surrounded:
    """A layer that is offloaded, or the first of a pass; `place` None: its weights stay."""

    weights: OffloadedWeights
    layer: RunnableLayer
    place: int | None
    is_first: bool

    @property
    def enter(self) -> Callable[[Tensor], Tensor]:
        return self.layer.enter

    def __call__(self, x: Tensor, h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x, h -> x, h for the next layer."""
        if self.is_first:
            self.weights.begin()
        if self.place is None:
            return self.layer(x, h, batch)
        self.weights.fetch(self.place)
        result = self.layer(x, h, batch)
        self.weights.release(self.place)
        return result


@dataclass(frozen=True, slots=True)
class _Spot:
    """Offset of a tensor within its layer's bytes, and its form."""

    tensor: Tensor
    at: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _StoredLayer:
    """A layer's weights on the host: pieces of pinned memory, one after the other, and the tensors
    that have no memory until they are moved into a buffer.
    """

    pieces: tuple[Tensor, ...]
    num_bytes: int
    spots: tuple[_Spot, ...]

    @classmethod
    def of(cls, tensors: Iterable[Tensor], driver: Driver) -> _StoredLayer:
        """Take the tensors' memory; those that share memory go on sharing it."""
        tensors = list({id(tensor): tensor for tensor in tensors}.values())
        memories, spots, end = {}, [], 0
        # the smallest items first: only they count every byte of memory that several share
        for tensor in sorted(tensors, key=lambda tensor: tensor.itemsize):
            address = tensor.untyped_storage().data_ptr()
            if address not in memories:
                flat = _all_bytes(tensor)
                memories[address] = end, flat
                end += -(-len(flat) // ALIGNMENT) * ALIGNMENT
            at = memories[address][0] + int(tensor.storage_offset()) * tensor.itemsize
            spots.append(_Spot(tensor, at, tensor.shape, tensor.stride()))
        sizes = [min(_PIECE_BYTES, end - start) for start in range(0, end, _PIECE_BYTES)]
        pieces = tuple(driver.pinned(size) for size in sizes)
        for at, flat in memories.values():
            for target, source in _overlaps(pieces, at, flat):
                driver.copy(target, source)
        driver.mark().wait()
        memories.clear()
        for spot in spots:
            spot.tensor.set_(spot.tensor.new_empty(0).untyped_storage())
        return cls(pieces, end, tuple(spots))

    def move_to(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Let the tensors lie in `buffer`, and return the copies that fill it."""
        for spot in self.spots:
            start = (int(buffer.storage_offset()) + spot.at) // spot.tensor.itemsize
            spot.tensor.set_(buffer.untyped_storage(), start, spot.size, spot.stride)
        return list(zip(buffer[: self.num_bytes].split(_PIECE_BYTES), self.pieces, strict=True))


def _all_bytes(tensor: Tensor) -> Tensor:
    """The memory that a tensor is a part of, uint8."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)


def _overlaps(pieces: Sequence[Tensor], at: int, flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The parts of `pieces`, which are parts of one row of bytes, that bytes from `at` on have, and
    those bytes.
    """
    done = 0
    while done < len(flat):
        number, offset = divmod(at + done, _PIECE_BYTES)
        length = min(len(flat) - done, _PIECE_BYTES - offset)
        yield pieces[number][offset : offset + length], flat[done : done + length]
        done += length
