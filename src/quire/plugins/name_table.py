"""Tables of names that plugins may add to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from quire.errors import PluginError
from quire.plugins.records import current_record

T = TypeVar("T")


class NameTable(Mapping[str, T], Generic[T]):
    """Values by name: Quire's own, which stay, and those that plugins or programs add.

    `what` names an entry in errors. `reserved` are names besides `own` that cannot be added: those
    of entries that are kept elsewhere. What a plugin added leaves with it if it fails.
    """

    def __init__(
        self,
        what: str,
        own: Mapping[str, T] = MappingProxyType({}),
        reserved: Collection[str] = (),
        check: Callable[[Any], None] | None = None,
    ) -> None:
        self.what = what
        self._own, self._reserved, self._check = own, reserved, check
        self._added: dict[str, tuple[T, str]] = {}

    def register(self, name: str, value: T) -> None:
        """Add an entry. The same one may be added again, as plugins are called in each process.

        Raises PluginError for a name that is taken or is not a string, and for a plugin that was
        given up; what the table's check raises for a value that it cannot use.
        """
        if not isinstance(name, str) or not name:
            raise PluginError(f"The name of a {self.what} must be a string, and is {name!r}.")
        if name in self._own or name in self._reserved:
            raise PluginError(
                f"The {self.what} {name!r} is Quire's own and cannot be replaced: register yours "
                "under another name."
            )
        if self._check is not None:
            self._check(value)
        record = current_record()
        who = "this program" if record is None else record.point.title
        if name in self._added:
            before, holder = self._added[name]
            if before == value:
                return
            raise PluginError(
                f"The {self.what} {name!r} is registered twice, by {holder} and by {who}: one of "
                "them has to use another name."
            )
        self._added[name] = value, who
        if record is not None:
            record.note(f"{self.what} {name}", lambda: self._added.pop(name, None))

    @property
    def added(self) -> Mapping[str, T]:
        """The entries that are not Quire's own."""
        return {name: value for name, (value, _) in self._added.items()}

    def holder(self, name: str) -> str:
        """Who added an entry: the title of a plugin, or "this program"."""
        return self._added[name][1]

    def __getitem__(self, name: str) -> T:
        return self._added[name][0] if name in self._added else self._own[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._added

    def __len__(self) -> int:
        return len(self._own) + len(self._added)
