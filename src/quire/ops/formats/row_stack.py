"""Weights that are made from several tensors, one above the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowStack:
    """A weight [out, in] of `dtype` as tensors with some of its rows each, in their order, which
    `read` reads one after the other: whoever packs them so never holds all of them. Each is valid
    until the next is read, and all are read once. sources: names for the contents of files that
    these rows are (models/loading/ahead/headers.py); None where they are made of something else.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    read: Callable[[], Iterator[Tensor]]
    sources: tuple[str, ...] | None = None
