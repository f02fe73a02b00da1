"""Checks values against their declared types before they are queued: the fields of messages to a
core, and the arguments of control verbs.

The checks are derived from the declarations themselves, so that a new field or a new argument is
checked without another line. What passes is decoded by a core as it was: a bool is not a number,
and neither a `Decimal` nor a subclass of `str` is a message's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral, Real
from operator import contains
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect as declared

from quire.errors import InvalidParameter, InvalidType
from quire.params import checks

CheckContents: TypeAlias = Callable[[Any, str], None]
"""(value, its name): raises InvalidType or InvalidParameter for what the value contains."""

_TRANSPARENT = "params"
"""The field of a message whose own fields are known to callers by their bare names."""


class _Every(frozenset[type]):
    """The classes of `Any`."""

    def __contains__(self, kind: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class DeclaredType:
    """A declared type, as a check of values.

    A value's class is one of `classes`, or the value is an instance of one of `others` (never a
    bool by these). `contents` checks the items of containers and the fields of structs, by class.
    `words` is how an error calls the type.
    """

    words: str
    classes: frozenset[type]
    others: tuple[type, ...] = ()
    contents: Mapping[type, CheckContents] = field(default_factory=dict)

    def check(self, value: Any, name: str) -> None:
        """Raise InvalidType for another type, InvalidParameter for NaN or not a literal's value."""
        kind = value.__class__
        if kind not in self.classes:
            if kind is bool or not isinstance(value, self.others):
                raise InvalidType(name, value, f"it must be {self.words}")
            kind = next((each for each in self.contents if isinstance(value, each)), kind)
        if isinstance(value, float) and value != value:
            raise InvalidParameter(name, value, "it must not be NaN")
        look = self.contents.get(kind)
        if look is not None:
            look(value, name)


def check_message(message: msgspec.Struct) -> None:
    """Raise InvalidType for the first field of a wrong type; some µs, 10 ns an item of a list."""
    _fields_of(type(message))(message, "")


class ArgumentTypes:
    """The declared types of a function's arguments.

    A number of any library is a number here, and a tuple a list: a verb makes plain values of them.
    Arguments without an annotation are not checked.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._signature = inspect.signature(function)
        hints = get_type_hints(function)
        self._types = {
            name: _of_hint(hint)
            for name, hint in hints.items()
            if (parameter := self._signature.parameters.get(name)) is not None
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise InvalidType for an argument of another type; TypeError, as the call itself would,
        for arguments that the function does not have.
        """
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            if name in self._types:
                self._types[name].check(value, name)


@cache
def argument_types(function: Callable[..., Any]) -> ArgumentTypes:
    """The declared types of the function's arguments; made once."""
    return ArgumentTypes(function)


# from declarations


@cache
def _fields_of(kind: type[msgspec.Struct]) -> _Fields:
    info = declared.type_info(kind)
    assert isinstance(info, declared.StructType), "messages are structs"
    return _Fields(info)


class _Fields:
    """Checks the fields of a struct: the classes of all of them at once, then the contents."""

    def __init__(self, info: declared.StructType) -> None:
        self._types = [(each.name, _of(each.type, is_exact=True)) for each in info.fields]
        self._classes = [each.classes for _, each in self._types]
        self._deep = [(at, *each) for at, each in enumerate(self._types) if each[1].contents]
        self._numbers = [at for at, kinds in enumerate(self._classes) if kinds == {float, int}]

    def __call__(self, struct: Any, name: str) -> None:
        path = "" if name in ("", _TRANSPARENT) else f"{name}."
        values = msgspec.structs.astuple(struct)
        is_plain = all(map(contains, self._classes, map(type, values)))
        if not is_plain or self._has_nan(values):
            for (own, kind), value in zip(self._types, values, strict=True):
                kind.check(value, path + own)
            return
        for at, own, kind in self._deep:
            if values[at] is not None:
                kind.check(values[at], path + own)

    def _has_nan(self, values: tuple[Any, ...]) -> bool:
        # one NaN makes the whole sum NaN, and a sum is faster than a look at each
        total = sum([values[at] for at in self._numbers])
        return bool(total != total)  # or infinities, which the single fields may have


def _of_hint(hint: Any) -> DeclaredType:
    if get_origin(hint) in (Union, UnionType):
        return _joined([_of_hint(each) for each in get_args(hint)])
    if get_origin(hint) is Callable:
        return DeclaredType("a function", frozenset(), (Callable,))  # type: ignore[arg-type]
    return _of(declared.type_info(hint), is_exact=False)


def _of(info: declared.Type, *, is_exact: bool) -> DeclaredType:
    """The check of a declaration. `is_exact`: only the very classes that a decoder makes."""
    if isinstance(info, declared.UnionType):
        return _joined([_of(each, is_exact=is_exact) for each in info.types])
    if isinstance(info, declared.AnyType):
        return DeclaredType("anything", _Every())
    if isinstance(info, declared.LiteralType):
        return _literal(info)
    if isinstance(info, declared.EnumType):
        return DeclaredType(f"a {info.cls.__name__}", frozenset((info.cls,)))
    if isinstance(info, declared.StructType):
        own = info.cls
        contents: dict[type, CheckContents] = {own: _fields_of(own)}
        return DeclaredType(f"a {own.__name__}", frozenset((own,)), (own,), contents)
    if isinstance(info, declared.CustomType):
        return DeclaredType(f"a {info.cls.__name__}", frozenset(), (info.cls,))
    if isinstance(info, declared.DictType):
        return _dict_of(
            *(_of(each, is_exact=is_exact) for each in (info.key_type, info.value_type)),
            is_exact=is_exact,
        )
    if isinstance(info, declared.ListType):
        items = _of(info.item_type, is_exact=is_exact)
        return _sequence_of(items, "a list", *((list,) if is_exact else (list, tuple)))
    if isinstance(info, declared.SetType):
        return _sequence_of(_of(info.item_type, is_exact=is_exact), "a set", set)
    if isinstance(info, declared.VarTupleType):
        return _sequence_of(_of(info.item_type, is_exact=is_exact), "a tuple", tuple)
    if isinstance(info, declared.TupleType):
        return _tuple_of([_of(each, is_exact=is_exact) for each in info.item_types])
    words, kinds, others = _PLAIN[type(info)]
    if is_exact:
        return DeclaredType(words, frozenset(kinds))
    looks = {kind: look for kind in (*kinds, *others) if (look := _LOOKS.get(kind)) is not None}
    return DeclaredType(words, frozenset(kinds), others, looks)


def _fits_64_bits(value: Any, name: str) -> None:
    if not -(2**63) <= value < 2**63:
        raise InvalidParameter(name, value, "it must fit 64 bits")


def _is_text(value: Any, name: str) -> None:
    checks.text(name, value)


_LOOKS: dict[type, CheckContents] = {
    int: _fits_64_bits,
    Integral: _fits_64_bits,
    str: _is_text,
}
"""Checks besides that of the class. The fields of messages are not checked: the front end has
completed them, and what cannot be encoded all the same is refused where it is.
"""


_PLAIN: dict[type[declared.Type], tuple[str, tuple[type, ...], tuple[type, ...]]] = {
    declared.NoneType: ("None", (type(None),), ()),
    declared.BoolType: ("True or False", (bool,), ()),
    declared.IntType: ("an int", (int,), (Integral,)),
    declared.FloatType: ("a number", (float, int), (Real,)),
    declared.StrType: ("a str", (str,), (str,)),
    declared.BytesType: ("bytes", (bytes,), ()),
}
"""Declaration -> words, the classes that a decoder makes, and those that arguments may be of."""


def _joined(kinds: Sequence[DeclaredType]) -> DeclaredType:
    return DeclaredType(
        " or ".join(dict.fromkeys(kind.words for kind in kinds)),
        frozenset().union(*(kind.classes for kind in kinds)),
        tuple(other for kind in kinds for other in kind.others),
        {each: look for kind in kinds for each, look in kind.contents.items()},
    )


def _literal(info: declared.LiteralType) -> DeclaredType:
    words = " or ".join(map(repr, info.values))
    kinds = frozenset(map(type, info.values))

    def is_one(value: object, name: str) -> None:
        if value not in info.values:
            raise InvalidParameter(name, value, f"it must be {words}")

    return DeclaredType(words, kinds, (), dict.fromkeys(kinds, is_one))


def _dict_of(keys: DeclaredType, values: DeclaredType, *, is_exact: bool) -> DeclaredType:
    def look(value: Mapping[Any, Any], name: str) -> None:
        _check_items(value.keys(), keys, name)
        _check_items(value.values(), values, name)

    others = () if is_exact else (Mapping,)
    return DeclaredType("a dict", frozenset((dict,)), others, {dict: look, Mapping: look})


def _sequence_of(items: DeclaredType, words: str, *kinds: type) -> DeclaredType:
    def look(value: Any, name: str) -> None:
        _check_items(value, items, name)

    return DeclaredType(words, frozenset(kinds), (), dict.fromkeys(kinds, look))


def _tuple_of(items: Sequence[DeclaredType]) -> DeclaredType:
    words = f"a tuple of {len(items)}"

    def look(value: tuple[Any, ...], name: str) -> None:
        if len(value) != len(items):
            raise InvalidType(name, value, f"it must be {words}")
        for one, kind in zip(value, items, strict=True):
            kind.check(one, name)

    return DeclaredType(words, frozenset((tuple,)), (), {tuple: look})


def _check_items(values: Any, kind: DeclaredType, name: str) -> None:
    if kind.contents or not kind.classes.issuperset(set(map(type, values))):
        for value in values:
            kind.check(value, name)
