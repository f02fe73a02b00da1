"""Two parts of models that are alike but for their values, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


class Different(Exception):
    """Names the field in which two parts differ apart from their values."""


def pairs_of(old: Any, new: Any, name: str = "form") -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of two parts that are alike, but for those that are places in memory. Raises
    Different.
    """
    if old is new:
        return
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise Different(name)
        yield old, new
    elif type(old) is not type(new):
        raise Different(name)
    elif is_dataclass(old):
        for each in fields(old):
            if not each.metadata.get("addresses"):
                yield from pairs_of(getattr(old, each.name), getattr(new, each.name), each.name)
    elif isinstance(old, list | tuple):
        if len(old) != len(new):
            raise Different(name)
        for a, b in zip(old, new, strict=True):
            yield from pairs_of(a, b, name)
    elif isinstance(old, bool | int | float | str | torch.dtype) and old != new:
        raise Different(name)


def is_same(old: Tensor, new: Tensor) -> bool:
    """Whether two tensors are in the same memory."""
    return old.data_ptr() == new.data_ptr()
