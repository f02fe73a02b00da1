"""Objects that clients make and ask for again, such as responses: in memory, a bounded number."""

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
    """At most `limit` things of `max_bytes` together; the oldest that are over make room."""

    def __init__(self, limit: int = 256, max_bytes: int = 64 * 2**20) -> None:
        self._limit = limit
        self.max_bytes = max_bytes
        """Bytes that all of them together may have."""
        self._kept: OrderedDict[str, T] = OrderedDict()

    @property
    def is_open(self) -> bool:
        return self._limit > 0

    def add(self, item: T) -> bool:
        """Keep one more. False if there is no room: it is too large, or nothing is over."""
        # decided before anything is dropped: what does not fit anyway must not cost others their
        # place
        dropped, is_enough = self._that_make_room(self._limit - 1, self.max_bytes - item.num_bytes)
        if not is_enough:
            return False
        for id in dropped:
            del self._kept[id]
        self._kept[item.id] = item
        return True

    def get(self, id: str, owner: bytes | None) -> T | None:
        """The thing with this id, if it is kept and the owner's."""
        kept = self._kept.get(id)
        # another owner's is unknown, not forbidden: a status of its own would tell that the id
        # exists
        return kept if kept is not None and kept.owner == owner else None

    def of(self, owner: bytes | None) -> list[T]:
        """All of one owner, the newest first."""
        return [kept for kept in reversed(self._kept.values()) if kept.owner == owner]

    def renew(self, id: str) -> None:
        """Have what is kept under this id make room last, and others for what it has become; itself
        it stays. Unknown ones are passed over.
        """
        if id in self._kept:
            self._kept.move_to_end(id)
            for other in self._that_make_room(self._limit, self.max_bytes, stays=id)[0]:
                del self._kept[other]

    def remove(self, id: str) -> None:
        """Keep it no longer; unknown ones are passed over."""
        self._kept.pop(id, None)

    def _that_make_room(
        self, num: int, num_bytes: int, *, stays: str | None = None
    ) -> tuple[list[str], bool]:
        """The oldest, but for the one that `stays`, without which at most `num` of at most
        `num_bytes` are left; and whether that is so then.
        """
        left, total, dropped = len(self._kept), sum(o.num_bytes for o in self._kept.values()), []
        for id, kept in self._kept.items():
            if left <= num and total <= num_bytes:
                break
            if kept.is_over and id != stays:
                left, total = left - 1, total - kept.num_bytes
                dropped.append(id)
        return dropped, left <= num and total <= num_bytes
