"""What clients make and ask for again, such as responses: kept in memory, a bounded number."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    """Something that is kept. `owner`: the digest of the API key that made it, and only this key
    retrieves it. `is_over`: it may make room for others. `num_bytes`: about what it takes as JSON,
    which may grow.
    """

    @property
    def id(self) -> str: ...

    @property
    def owner(self) -> bytes | None: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Owned)


class OwnedStore(Generic[T]):
    """At most `limit` things of `max_bytes` together, the oldest of which make room; one that is
    not over stays.
    """

    def __init__(self, limit: int = 256, max_bytes: int = 64 * 2**20) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, T] = OrderedDict()

    @property
    def is_open(self) -> bool:
        """Whether anything is kept at all."""
        return self._limit > 0

    def add(self, item: T) -> bool:
        """Keep one more. False if there is no room: it is too large, or nothing is over."""
        if not self._make_room(self._limit - 1, self._max_bytes - item.num_bytes):
            return False
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
        """Have what is kept under this id make room last, and others for what it has become."""
        self._kept.move_to_end(id)
        self._make_room(self._limit, self._max_bytes)

    def remove(self, id: str) -> None:
        """Keep it no longer; unknown ones are passed over."""
        self._kept.pop(id, None)

    def _make_room(self, num: int, num_bytes: int) -> bool:
        """Drop the oldest until at most `num` of at most `num_bytes` are left. False if it fails:
        then nothing is dropped.
        """
        left, total, dropped = len(self._kept), sum(o.num_bytes for o in self._kept.values()), []
        for id, kept in self._kept.items():
            if left <= num and total <= num_bytes:
                break
            if kept.is_over:
                left, total = left - 1, total - kept.num_bytes
                dropped.append(id)
        if left > num or total > num_bytes:
            return False
        for id in dropped:
            del self._kept[id]
        return True
