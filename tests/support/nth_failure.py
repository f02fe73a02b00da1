"""Makes the n-th call of a fault point fail, so that every place in which a request's handling can
go wrong does so once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


class InjectedFailure(Exception):
    """What a fault point raises; its text has what no user may ever see."""

    def __init__(self, point: str, number: int) -> None:
        super().__init__(f"call {number} of {point} at 0x7f9b1c604ba0")


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """A function by its place: a class or module, and the name there."""

    owner: Any
    name: str

    def __str__(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}"


@dataclass(slots=True)
class Calls:
    """How often a fault point was called, and whether it has failed."""

    count: int = 0
    failed: list[int] = field(default_factory=list)


@contextmanager
def failing(point: FaultPoint, number: int | None = None) -> Iterator[Calls]:
    """While this holds, call `number` of the point raises InjectedFailure (None: calls are only
    counted). Later calls succeed again.
    """
    real: Callable[..., Any] = getattr(point.owner, point.name)
    calls = Calls()

    def counted(*args: Any, **options: Any) -> Any:
        calls.count += 1
        if calls.count == number:
            calls.failed.append(number)
            raise InjectedFailure(str(point), number)
        return real(*args, **options)

    setattr(point.owner, point.name, counted)
    try:
        yield calls
    finally:
        setattr(point.owner, point.name, real)
