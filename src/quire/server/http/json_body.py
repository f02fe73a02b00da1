"""Bodies of JSON. Those of requests are received within bounds of size and time, and decoded to
their types with errors that name the field. Heads: connection.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from quire.encodable import to_json
from quire.server.http.failures import JSON, Refusal
from quire.server.http.fields import IGNORED_SLOT, FieldRules, joined
from quire.server.http.json_weight import LIGHT_BYTES, MOST_CONTAINERS, check_weight

T = TypeVar("T")

_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = "Object contains unknown field"
_MISSING = re.compile(r"Object missing required field `(.*)`")
_MAX_SHOWN = 200
_HELD_SLOT = "quire.held_body_bytes"
_SMALL_BYTES = 1 << 16


def json_response(content: object) -> Response:
    """A reply (200) with `content` as JSON."""
    return Response(to_json(content), media_type=JSON)


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
        raise Refusal(415, text, headers={"Accept-Encoding": "identity", "Connection": "close"})


def _weighed(data: bytes, type: type[T], rules: FieldRules) -> tuple[T, list[str]]:
    """Decodes like `decode`, unless that would take too much work."""
    if len(data) > LIGHT_BYTES:
        check_weight(data, getattr(type, "MOST_CONTAINERS", MOST_CONTAINERS))
    return decode(data, type, rules)


def decode(data: bytes, type: type[T], rules: FieldRules) -> tuple[T, list[str]]:
    """`data` as a `type`, and the fields that were left out. Raises Refusal (400) that names the
    field.
    """
    ignored: list[str] = []
    try:
        try:
            body = msgspec.json.decode(data, type=type)
        except msgspec.ValidationError as error:
            if _UNKNOWN not in str(error):
                raise
            body, ignored = rules.convert(data, type)
        return body, ignored + rules.settle(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"The body is not valid JSON: {str(error)[:_MAX_SHOWN]}."
        raise Refusal(400, text) from None


async def read_body(
    request: Request, max_bytes: int, timeout_s: float, budget: BodyBudget
) -> bytes:
    """The request's body. Raises Refusal: see `read_json`."""
    _check_encoding(", ".join(request.headers.getlist("content-encoding")))
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if size > _SMALL_BYTES:
                    budget.hold(request.scope["state"], len(piece))
                pieces.append(piece)
    except TimeoutError:
        text = f"The body did not arrive within {timeout_s:g} s."
        raise Refusal(408, text, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise Refusal(400, "The client disconnected while it was sending.") from None
    return b"".join(pieces)


async def until_disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int) -> Refusal:
    text = f"The body is larger than {max_bytes} bytes, the most that this server reads."
    return Refusal(413, text, headers={"Connection": "close"})


def _invalid(text: str) -> Refusal:
    """The decoder's sentence with the field as `messages[0].role`."""
    place = ""
    if found := _PLACE.search(text):
        place, text = found.group(1), text[: found.start()]
    if missing := _MISSING.match(text):
        place, text = joined(place, missing.group(1)), "This required field is missing"
    message = f"{place or 'The body'}: {text[:_MAX_SHOWN]}."
    return Refusal(400, message, param=place[:_MAX_SHOWN] or None)
