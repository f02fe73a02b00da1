"""Lists that are served page by page."""

from __future__ import annotations

from starlette.datastructures import QueryParams

from quire.errors import InvalidParameter


def page_limit(query: QueryParams, most: int) -> int:
    """Number of items that the query asks for, 20 by default. Raises InvalidParameter."""
    limit = query.get("limit", "20")
    # the length is bounded before int(), which takes long for very many digits
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise InvalidParameter("limit", limit[:80], f"it must be 1 to {most}")
    return int(limit)
