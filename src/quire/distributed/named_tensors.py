"""The description of tensors that are sent: names, types and shapes, and how they are put together
into buffers. Trainer and worker follow from it in which order they send and receive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import InvalidParameter

BUFFER_BYTES = 1 << 30
"""Bytes after which a buffer is sent."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


class TensorMeta(NamedTuple):
    """A tensor's name, type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The type's name without that of torch."""
        return str(self.dtype).removeprefix("torch.")


class TensorPatch(NamedTuple):
    """New values of a tensor at some `places` of it, flat; None: at all of them."""

    meta: TensorMeta
    places: Tensor | None
    values: Tensor


def metas_of(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[TensorMeta]:
    """The tensors that three lists describe. Raises InvalidParameter for lists that are not equally
    long, and for what is not a type or a shape.
    """
    for what, given in (("names", names), ("dtype_names", dtype_names), ("shapes", shapes)):
        if not isinstance(given, list | tuple):
            raise InvalidParameter(what, given, "a list")
    if not len(names) == len(dtype_names) == len(shapes):
        counts = f"{len(names)}, {len(dtype_names)} and {len(shapes)}"
        raise InvalidParameter("update_info", counts, "as many names as dtype_names and shapes")
    each = zip(names, map(_dtype, dtype_names), map(_shape, shapes), strict=True)
    return [TensorMeta(*meta) for meta in each]


def chunks_of(metas: Iterable[TensorMeta], limit: int) -> Iterator[list[TensorMeta]]:
    """Tensors that are sent as one buffer: each buffer ends with the tensor by which it has more
    than `limit` bytes, or with the last one.
    """
    chunk: list[TensorMeta] = []
    total = 0
    for meta in metas:
        chunk.append(meta)
        total += meta.nbytes
        if total > limit:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor is of; None: it is of none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def layer_runs(metas: Iterable[TensorMeta], limit: int) -> Iterator[list[TensorMeta]]:
    """Tensors in their order, in runs of whole layers with no more than `limit` bytes, unless one
    layer has more. Engines load a layer from where it was received.
    """
    run: list[TensorMeta] = []
    total = 0
    for _, layer in groupby(metas, lambda meta: layer_of(meta.name)):
        group = list(layer)
        size = sum(meta.nbytes for meta in group)
        if run and total + size > limit:
            yield run
            run, total = [], 0
        run += group
        total += size
    if run:
        yield run


def views_of(buffer: Tensor, metas: Sequence[TensorMeta]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie one after the other in a buffer of bytes. One whose place is not a
    multiple of its items' size is copied.
    """
    at = 0
    for meta in metas:
        data = buffer[at : at + meta.nbytes]
        at += meta.nbytes
        if data.storage_offset() % meta.dtype.itemsize:
            data = data.clone()
        yield meta.name, data.view(meta.dtype).view(meta.shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """The values as bytes [n]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidParameter("dtype_names", name, "a type of torch, such as 'bfloat16'")
    return found


def _shape(given: Sequence[int]) -> tuple[int, ...]:
    is_list = isinstance(given, list | tuple)
    if not is_list or any(type(n) is not int or n < 0 for n in given):
        raise InvalidParameter("shapes", given, "lists of numbers that are not negative")
    return tuple(given)
