"""Replies with a JSON body."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

JSON = "application/json"


def json_response(content: object) -> Response:
    """A reply (200) with `content` as JSON."""
    return Response(msgspec.json.encode(content), media_type=JSON)
