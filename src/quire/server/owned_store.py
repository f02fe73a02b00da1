"""What clients make and ask for again, such as responses: kept in memory, a bounded number."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    """Something that is kept. `owner`: the digest of the API key that made it, and only this key
    retrieves it. `is_over`: it may make room for others.
    """

    @property
    def id(self) -> str: ...

    @property
    def owner(self) -> bytes | None: ...

    @property
    def is_over(self) -> bool: ...


T = TypeVar("T", bound=Owned)


class OwnedStore(Generic[T]):
    """At most `limit` things, the oldest of which make room; one that is not over stays."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, T] = OrderedDict()

    @property
    def is_open(self) -> bool:
        """Whether anything is kept at all."""
        return self._limit > 0

    def add(self, item: T) -> bool:
        """Keep one more. False if there is no room: nothing that is kept is over."""
        while len(self._kept) >= self._limit:
            oldest = next((id for id, kept in self._kept.items() if kept.is_over), None)
            if oldest is None:
                return False
            del self._kept[oldest]
        self._kept[item.id] = item
        return True

    def get(self, id: str, owner: bytes | None) -> T | None:
        """The thing with this id, if it is kept and the owner's."""
        kept = self._kept.get(id)
        return kept if kept is not None and kept.owner == owner else None

    def of(self, owner: bytes | None) -> list[T]:
        """All of one owner, the newest first."""
        return [kept for kept in reversed(self._kept.values()) if kept.owner == owner]

    def renew(self, id: str) -> None:
        """Have what is kept under this id make room last."""
        self._kept.move_to_end(id)

    def remove(self, id: str) -> None:
        """Keep it no longer; unknown ones are passed over."""
        self._kept.pop(id, None)
