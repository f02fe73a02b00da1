"""Bodies of JSON. Those of requests are received within bounds of size and time, and decoded to
their types with errors that name the field; `FieldRules` decide about fields that a type does not
declare. Heads: connection.py.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.encodable import to_json
from quire.server.http.failures import JSON, Refusal
from quire.server.http.fields import (
    HARMLESS,
    HARMLESS_IN_OBJECTS,
    IGNORED_SLOT,
    Accepts,
    unknown_field,
)
from quire.server.http.json_weight import LIGHT_BYTES, MOST_CONTAINERS, check_weight

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = "Object contains unknown field"
_MISSING = re.compile(r"Object missing required field `(.*)`")
_MAX_SHOWN = 200
_MAX_UNKNOWN = 256
_HELD_SLOT = "quire.held_body_bytes"
_SMALL_BYTES = 1 << 16


def json_response(content: object) -> Response:
    """A reply (200) with `content` as JSON."""
    return Response(to_json(content), media_type=JSON)


PlainObject = tuple[str, dict[str, Any], frozenset[str]]
"""Path of an object in its body, the object, and the names of its fields."""


@runtime_checkable
class HasObjects(Protocol):
    """A body with objects that are decoded as dicts, such as messages."""

    def objects(self) -> Iterator[PlainObject]:
        """The objects of the body."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A body with parts that this server does not have and that the answer can do without."""

    def leave_out(self) -> list[str]:
        """Take them out of the body, in place. Returns where they were."""
        ...


def objects_in(place: str, items: Any, known: frozenset[str]) -> Iterator[PlainObject]:
    """The objects of a list, if it is one."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield f"{place}[{index}]", item, known


class FieldRules:
    """Strictness about fields. `is_strict`: one that is not declared is refused in any case."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._logged: set[str] = set()
        self._kinds: dict[type[Any], inspect.Type] = {}

    def convert(self, data: bytes, kind: type[Any]) -> tuple[Any, list[str]]:
        """Decode `data`, which has fields that `kind` does not declare, to a `kind`; also returns
        the names of those that were left out. Raises Refusal, msgspec.ValidationError.
        """
        body = msgspec.json.decode(data)
        ignored: list[str] = []
        if kind not in self._kinds:
            self._kinds[kind] = inspect.type_info(kind)
        self._settle(body, self._kinds[kind], "", ignored)
        return msgspec.convert(body, kind), ignored

    def settle(self, body: object) -> list[str]:
        """Apply the rules to the plain objects of a decoded body, in place. Returns the names of
        the fields that were left out there, and of those that are declared without having an
        effect. Raises Refusal.
        """
        ignored: list[str] = []
        for name in getattr(body, "WITHOUT_EFFECT", ()):
            if getattr(body, name) is not None:
                self._note(name)
                ignored.append(name)
        if isinstance(body, LeavesOut) and not self.is_strict:
            for place in body.leave_out():
                self._note(place.partition("[")[0])
                ignored.append(place)
        if isinstance(body, HasObjects):
            for place, item, known in body.objects():
                if not item.keys() <= known:
                    self._settle_names(item, known, HARMLESS_IN_OBJECTS, place, ignored)
        return ignored

    def _settle(self, value: Any, kind: inspect.Type, place: str, ignored: list[str]) -> None:
        if isinstance(kind, inspect.UnionType):
            for part in kind.types:
                self._settle(value, part, place, ignored)
        elif isinstance(kind, inspect.ListType) and isinstance(value, list):
            for index, item in enumerate(value):
                self._settle(item, kind.item_type, f"{place}[{index}]", ignored)
        elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
            fields = {field.encode_name: field for field in kind.fields}
            self._settle_names(value, fields, HARMLESS, place, ignored)
            for name, item in value.items():
                self._settle(item, fields[name].type, joined(place, name), ignored)

    def _settle_names(
        self,
        given: dict[str, Any],
        known: Collection[str],
        harmless: Mapping[str, Accepts],
        place: str,
        ignored: list[str],
    ) -> None:
        """Leave out of `given` what has no effect. Raises Refusal for what would have one."""
        # a hundred thousand null fields took the event loop 150 ms to look up and take out
        if len(given) > len(known) + _MAX_UNKNOWN:
            text = (
                f"{place or 'The body'} has more than {_MAX_UNKNOWN} unknown fields. Remove them."
            )
            raise Refusal(400, text, param=place[:_MAX_SHOWN] or None)
        for name in [name for name in given if name not in known]:
            value, param = given[name], joined(place, name)
            if self.is_strict:
                raise unknown_field(param, name, known)
            if value is not None:
                if name not in harmless or not harmless[name](value):
                    raise unknown_field(param, name, known)
                self._note(name)
                ignored.append(param)
            del given[name]

    def _note(self, name: str) -> None:
        # once for each name: clients send the same fields with every request
        if name not in self._logged:
            self._logged.add(name)
            logger.info("Requests have the field %s, which has no effect here.", name)


class BodyBudget:
    """Bytes of large bodies that all requests together may hold; small ones are not counted."""

    def __init__(self, num_bytes: int) -> None:
        self._free = num_bytes
        self.turn = asyncio.Lock()
        """Held while one of them is decoded. Several threads at once would each get the interpreter
        as often as the loop does, and streams would wait for all of them at every write.
        """

    def hold(self, state: dict[str, Any], num_bytes: int) -> None:
        """Count `num_bytes` more of the request whose scope has `state`. Raises Refusal (503)."""
        if num_bytes > self._free:
            # refused and not queued: a request that waits would hold what it has read so far
            text = "Too many large bodies are being worked on; try again."
            raise Refusal(503, text, headers={"Retry-After": "1", "Connection": "close"})
        self._free -= num_bytes
        state[_HELD_SLOT] = state.get(_HELD_SLOT, 0) + num_bytes

    def release(self, state: dict[str, Any]) -> None:
        """The request is answered."""
        self._free += state.pop(_HELD_SLOT, 0)


async def read_json(
    request: Request,
    type: type[T],
    rules: FieldRules,
    *,
    max_bytes: int,
    timeout_s: float,
    budget: BodyBudget,
    check: Callable[[bytes], None] | None = None,
) -> T:
    """The request's body as a `type`; the names of fields that were left out are kept in the
    request's state. `check` looks at a large body before it is decoded.

    Raises Refusal: 400 for what is not JSON of this type or takes too much work to decode, 408 for
    a body that does not arrive within `timeout_s`, 413 for one above `max_bytes`, 415 for one that
    is compressed (another content type is 400, as clients of this API expect), 503 when `budget`
    has no room for it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise Refusal(400, "Unsupported Media Type: send Content-Type: application/json.")
    data = await read_body(request, max_bytes, timeout_s, budget)
    if len(data) > _SMALL_BYTES:
        async with budget.turn:
            if check is not None:
                check(data)
            body, ignored = await asyncio.to_thread(_weighed, data, type, rules)
    else:
        body, ignored = _weighed(data, type, rules)
    if ignored:
        request.scope["state"][IGNORED_SLOT] = ignored
    return body


def _check_encoding(encodings: str) -> None:
    """Raise Refusal (415) for a body that would have to be decoded first."""
    named = {name.strip().lower() for name in encodings.split(",")} - {"", "identity"}
    if named:
        text = f"Content-Encoding: {encodings[:_MAX_SHOWN]} is not supported: send it as it is."
        # a small body could unpack to any size; the header says what is accepted (RFC 9110, 12.5.3)
        raise Refusal(415, text, headers={"Accept-Encoding": "identity", "Connection": "close"})


def _weighed(data: bytes, type: type[T], rules: FieldRules) -> tuple[T, list[str]]:
    """Decodes like `decode`, unless that would take too much work."""
    if len(data) > LIGHT_BYTES:
        check_weight(data, getattr(type, "MOST_CONTAINERS", MOST_CONTAINERS))
    return decode(data, type, rules)


def decode(data: bytes, type: type[T], rules: FieldRules) -> tuple[T, list[str]]:
    """`data` as a `type`, and the fields left out. Raises Refusal (400) that names the field."""
    ignored: list[str] = []
    try:
        try:
            body = msgspec.json.decode(data, type=type)
        except msgspec.ValidationError as error:
            # most bodies have declared fields only, so the typed decoder goes first; it stops at an
            # unknown field, and then the body is decoded again in plain objects, from which fields
            # can be taken out
            if _UNKNOWN not in str(error):
                raise
            body, ignored = rules.convert(data, type)
        return body, ignored + rules.settle(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    # RecursionError: brackets that are nested deeper than the interpreter's stack
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"The body is not valid JSON: {str(error)[:_MAX_SHOWN]}."
        raise Refusal(400, text) from None


def read_query(given: Mapping[str, Any], type: type[T]) -> T:
    """The variables of a query as a `type`. Raises Refusal (400) that names one as `query.mode`."""
    try:
        # not strict: numbers and flags are texts in a query
        return msgspec.convert(given, type, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), "query") from None


async def read_body(
    request: Request, max_bytes: int, timeout_s: float, budget: BodyBudget
) -> bytes:
    """The request's body. Raises Refusal: see `read_json`."""
    _check_encoding(", ".join(request.headers.getlist("content-encoding")))
    length = request.headers.get("content-length", "")
    # refused by its head, before any of it is read; a body in chunks has no length and is counted
    # below
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                # small bodies are never refused for the large ones of others; and a body counts as
                # it arrives, so that a client that announces much and sends nothing takes no room
                if size > _SMALL_BYTES:
                    budget.hold(request.scope["state"], len(piece))
                pieces.append(piece)
    except TimeoutError:
        text = f"The body did not arrive within {timeout_s:g} s."
        raise Refusal(408, text, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise Refusal(400, "The client disconnected while it was sending.") from None
    return b"".join(pieces)


def _too_large(max_bytes: int) -> Refusal:
    text = f"The body is larger than {max_bytes} bytes, the most that this server reads."
    # the rest of the body is not read, so the connection cannot carry another request
    return Refusal(413, text, headers={"Connection": "close"})


def _invalid(text: str, whole: str = "") -> Refusal:
    """The decoder's sentence with the field as `messages[0].role`, within what `whole` names."""
    place = whole
    if found := _PLACE.search(text):
        place, text = joined(whole, found.group(1)), text[: found.start()]
    if missing := _MISSING.match(text):
        place, text = joined(place, missing.group(1)), "This required field is missing"
    message = f"{place or 'The body'}: {text[:_MAX_SHOWN]}."
    return Refusal(400, message, param=place[:_MAX_SHOWN] or None)


def joined(place: str, name: str) -> str:
    """The place of a field within an object that is at `place`."""
    return f"{place}.{name}" if place else name
