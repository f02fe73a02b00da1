"""Sizes, lists and imports by name, as `vllm.utils` has them for programs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

KiB_bytes, MiB_bytes, GiB_bytes = (1024**power for power in (1, 2, 3))
KB_bytes, MB_bytes, GB_bytes = (1000**power for power in (1, 2, 3))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def round_up(x: int, y: int) -> int:
    """The least multiple of y that is not below x."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """The largest multiple of y that is not above x."""
    return x // y * y


def as_list(maybe_list: Iterable[T]) -> list[T]:
    """The items as a list; a list itself."""
    return maybe_list if isinstance(maybe_list, list) else list(maybe_list)


def is_list_of(value: object, typ: Any, *, check: str = "first") -> bool:
    """Whether a value is a list of items of a type: the first, or with check="all" every one."""
    if not isinstance(value, list):
        return False
    return all(isinstance(item, typ) for item in (value[:1] if check == "first" else value))


def chunk_list(lst: Sequence[T], chunk_size: int) -> Iterator[Sequence[T]]:
    """Parts of `chunk_size` items, the last one with what is left."""
    return (lst[at : at + chunk_size] for at in range(0, len(lst), chunk_size))


def resolve_obj_by_qualname(qualname: str) -> Any:
    """The object that `module.name` names."""
    module, _, name = qualname.rpartition(".")
    return getattr(importlib.import_module(module), name)
