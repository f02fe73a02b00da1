"""Limits on what is fetched, and on how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.errors import CapacityError
from quire.media.faults import MediaFault


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """`allowed_domains`: exact names of hosts, all if empty. `local_root`: the folder whose files
    may be named, none if empty. `allows_private`: also addresses that are not of the internet.
    `proxies`: by scheme, used for all hosts; the environment is not looked at here.

    `max_bytes` of an item, `max_total_bytes` of all items of a request, `max_held_bytes` of those
    of all requests that are being loaded at the same time. A try takes at most `timeout_s`, four
    times as long the next; all of them `total_s`.
    """

    allowed_domains: tuple[str, ...] = ()
    local_root: str = ""
    allows_redirects: bool = True
    allows_private: bool = False
    proxies: Mapping[str, str] = field(default_factory=dict)
    max_bytes: int = 256 * 2**20
    max_total_bytes: int = 512 * 2**20
    max_held_bytes: int = 2 * 2**30
    max_redirects: int = 5
    timeout_s: float = 5.0
    total_s: float = 60.0
    num_tries: int = 3
    num_at_once: int = 8


class FetchFault(MediaFault):
    """An item cannot be fetched (HTTP 422). `may_pass`: a later try may succeed (HTTP 500)."""

    def __init__(self, words: str, *, label: str = "The picture", may_pass: bool = False) -> None:
        super().__init__(words, label=label)
        self.may_pass = may_pass
        self.http_status = 500 if may_pass else 422

    def of(self, label: str) -> FetchFault:
        """The same of another item."""
        return FetchFault(self.words, label=label, may_pass=self.may_pass)


class HeldBytes:
    """The bytes of all requests that are being loaded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Hold so many more. Raises CapacityError when there is no room for them."""
        if self.num_bytes + num_bytes > self._most:
            text = "Too many bytes of media are being loaded. Try again later."
            raise CapacityError(text, retry_after_s=1.0)
        self.num_bytes += num_bytes


class ByteBudget:
    """The bytes that all items of a request may still take, and have taken of `held`."""

    def __init__(self, num_bytes: int, held: HeldBytes | None = None) -> None:
        self._total = self._left = num_bytes
        self._held = held
        self._num_held = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes. Raises FetchFault for too many here, CapacityError for those of all."""
        self._left -= num_bytes
        if self._left < 0:
            raise FetchFault(f"has too many bytes: all of a request have at most {self._total}")
        if self._held is not None:
            self._held.take(num_bytes)
            self._num_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Let go of what a failed try has read; nothing after `release`, as a try may end later."""
        self._left += num_bytes
        freed = min(num_bytes, self._num_held)
        if self._held is not None:
            self._held.num_bytes -= freed
        self._num_held -= freed

    def release(self) -> None:
        """The request is loaded, or has failed. Idempotent."""
        if self._held is not None:
            self._held.num_bytes -= self._num_held
        self._num_held = 0
