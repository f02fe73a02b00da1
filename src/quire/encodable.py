"""Encodes what leaves a process: texts and values on their way to another one or to a client.

A text may hold a lone surrogate (a name in a spoiled file, an argument of bytes that are not UTF-8,
what a template wrote), for which UTF-8 has no form: it leaves as its escape, `\\udc80`.
A value without a form (an int of more than 64 bits, one that holds itself, an object) is refused
with one sentence. Every message and every reply is encoded with the functions of this module, so
that neither raises anything else where it is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from quire.errors import EngineError, shown

MOST_LEVELS = 64
"""Levels of nesting that values of any type may have. A receiver can decode fewer levels than a
sender can encode, by as many as its own calls are deeper.
"""

_MOST_CHARS = 1 << 14
_FLAT = frozenset({type(None), bool, int, float, str, bytes})

_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class NotEncodable(TypeError):
    """A value that cannot be sent; the text says why: "it has an int of more than 64 bits"."""


def plain_text(text: str) -> str:
    """`text` with lone surrogates as escapes; the same object if it has none."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """The text of an error, cut at a length that a message may have; its class if it has none."""
    try:
        text = str(error)
    except Exception:  # the class is somebody else's
        text = ""
    return plain_text(text[:_MOST_CHARS]) or type(error).__name__


def to_json(value: object) -> bytes:
    """`value` as JSON. Raises NotEncodable."""
    return encoded(_to_json, value)


def json_or_repr(value: object) -> str:
    """A value as its sender wrote it, for a text about it."""
    try:
        return to_json(value).decode()
    except NotEncodable:
        return plain_text(shown(value))


def to_msgpack(value: object) -> bytes:
    """`value` as MessagePack. Raises NotEncodable."""
    return encoded(_to_msgpack, value)


def encoded(encode: Callable[[Any], bytes], value: object, *, is_strict: bool = False) -> bytes:
    """Encode a value, or a copy with plain texts. `is_strict`: other texts are refused as well, as
    in what a program asks for. Raises NotEncodable, and what a hook of `encode` raises of our own
    errors.
    """
    try:
        return encode(value)
    except UnicodeEncodeError as error:
        if is_strict:
            text = "it has a text with a lone surrogate"
            raise NotEncodable(text) from error
    except EngineError:  # of a hook
        raise
    except Exception as error:  # fields of somebody else's class may raise anything
        raise _refusal(error) from error
    try:
        return encode(with_plain_texts(value))
    except Exception as error:
        raise _refusal(error) from error


def with_plain_texts(value: Any) -> Any:
    """A copy of a value of any type with `plain_text` for each text in it."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, dict):
        return {with_plain_texts(key): with_plain_texts(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [with_plain_texts(item) for item in value]  # all are encoded as one
    if (names := _field_names(value)) is None:
        return value
    plain = {name: with_plain_texts(getattr(value, name)) for name in names}
    return msgspec.structs.replace(value, **plain) if isinstance(value, msgspec.Struct) else plain


def check_levels(value: object) -> None:
    """Raise NotEncodable for a value with more than `MOST_LEVELS`, as one has that holds itself."""
    try:
        _check_levels(value, MOST_LEVELS)
    except Exception as error:
        raise _refusal(error) from error


def _check_levels(value: object, most: int) -> None:
    items = _items(value)
    if items and not most:
        raise NotEncodable(f"it is nested more than {MOST_LEVELS} levels deep, or holds itself")
    for item in items:
        if type(item) not in _FLAT:
            _check_levels(item, most - 1)


def _items(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return [getattr(value, name) for name in _field_names(value) or ()]


def _field_names(value: object) -> Collection[str] | None:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return None


def _refusal(error: Exception) -> NotEncodable:
    if isinstance(error, NotEncodable):
        return error
    if isinstance(error, OverflowError):
        return NotEncodable("it has an int of more than 64 bits")
    if isinstance(error, RecursionError):
        return NotEncodable("it is nested too deeply, or holds itself")
    if isinstance(error, TypeError | ValueError):
        return NotEncodable(text_of(error))
    return NotEncodable(f"to read it raises {type(error).__name__}: {text_of(error)}")
