"""Reading what a client sends: bounded in bytes and time, decoded strictly, with errors that name
the field.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from quire.server.http.failures import Refusal

T = TypeVar("T")

_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MAX_SHOWN = 200


async def read_json(request: Request, type: type[T], *, max_bytes: int, timeout_s: float) -> T:
    """The request's body as a `type`.

    Raises Refusal: 400 for what is not JSON of this type, 408 for a body that does not arrive
    within `timeout_s`, 413 for one above `max_bytes`, 415 never: another content type is 400, as
    clients of this API expect.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(400, "Unsupported Media Type: send Content-Type: application/json.")
    return decode(await _read(request, max_bytes, timeout_s), type)


def decode(data: bytes, type: type[T]) -> T:
    """`data` as a `type`. Raises Refusal (400) that names the field."""
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"The body is not valid JSON: {str(error)[:_MAX_SHOWN]}."
        raise Refusal(400, text, kind="Bad Request") from None


async def _read(request: Request, max_bytes: int, timeout_s: float) -> bytes:
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
                pieces.append(piece)
    except TimeoutError:
        text = f"The body did not arrive within {timeout_s:g} s."
        raise Refusal(408, text, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise Refusal(400, "The client went away while it was sending.") from None
    return b"".join(pieces)


def _too_large(max_bytes: int) -> Refusal:
    text = f"The body is larger than {max_bytes} bytes, the most that this server reads."
    return Refusal(413, text, headers={"Connection": "close"})


def _invalid(text: str) -> Refusal:
    """The decoder's sentence with the place in our words: `body.messages[0].role`."""
    place = ""
    if found := _PLACE.search(text):
        place, text = found.group(1), text[: found.start()]
    if unknown := _UNKNOWN.search(text):
        place = f"{place}.{unknown.group(1)}" if place else unknown.group(1)
        text = f"{unknown.group(1)!r} is not a field here. Remove it, or look at /openapi.json"
    param = f"body.{place}" if place else "body"
    message = f"1 validation error: {param}: {text[:_MAX_SHOWN]}."
    return Refusal(400, message, param=param[:_MAX_SHOWN], kind="Bad Request")
