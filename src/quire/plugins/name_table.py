"""Tables of names that plugins may add to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from quire.errors import PluginError
from quire.plugins.records import current_record
from quire.plugins.references import resolve_reference

T = TypeVar("T")
PROGRAM = "this program"
"""The holder of entries that a program registers by itself."""

_tables: dict[str, NameTable[Any]] = {}


class NameTable(Mapping[str, T], Generic[T]):
    """Values by name: Quire's own, which stay, and those that plugins or programs add.

    `what` names an entry in errors. `reserved` are names besides `own` that cannot be added: those
    of entries that are kept elsewhere. `home`: the table's own name as "module:attribute", where a
    value may be given by its name; entries of a program then reach the processes that it starts.
    What a plugin added leaves with it if it fails.
    """

    def __init__(
        self,
        what: str,
        own: Mapping[str, T] = MappingProxyType({}),
        reserved: Collection[str] = (),
        check: Callable[[Any], None] | None = None,
        home: str | None = None,
    ) -> None:
        self.what = what
        if home is not None:
            _tables[home] = self
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
        who = PROGRAM if record is None else record.point.title
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
        """The title of the plugin that added an entry, or "this program"."""
        return self._added[name][1]

    def __getitem__(self, name: str) -> T:
        return self._added[name][0] if name in self._added else self._own[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._added

    def __len__(self) -> int:
        return len(self._own) + len(self._added)

    def entries_by_name(self) -> Iterator[tuple[str, str]]:
        """A program's entries as "module:attribute", but those that cannot be named so."""
        for name, (value, who) in self._added.items():
            if who == PROGRAM and (named := _name_of(value)) is not None:
                yield name, named


def program_entries() -> list[tuple[str, str, str]]:
    """The entries of the program, for the processes that it starts: (table, name, value)."""
    return sorted(
        (home, name, value)
        for home, table in _tables.items()
        for name, value in table.entries_by_name()
    )


def register_all(entries: Collection[tuple[str, str, str]]) -> None:
    """Register what the starter of this process has: see `program_entries`."""
    for home, name, value in entries:
        resolve_reference(home).register(name, value)


def _name_of(value: object) -> str | None:
    if isinstance(value, str):
        return value
    module, name = (getattr(value, key, None) for key in ("__module__", "__qualname__"))
    is_found = isinstance(module, str) and isinstance(name, str) and "<" not in name
    return f"{module}:{name}" if is_found else None
