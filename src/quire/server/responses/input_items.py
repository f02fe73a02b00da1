"""`/v1/responses/{id}/input_items`: the items of a stored response's request."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from quire.errors import InvalidParameter
from quire.server.http.paging import page_limit

_MOST = 100
_PREFIXES = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class InputItems(msgspec.Struct):
    """A page of items, the newest first unless asked for otherwise."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def named_items(given: str | list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """The items of a request, each with its type and an id, texts as parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    stem = response_id.removeprefix("resp_")
    return [_named(item, f"{stem}{number:04x}") for number, item in enumerate(given)]


def _named(item: dict[str, Any], number: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    named = {"id": f"{_PREFIXES.get(kind, 'msg')}_{number}", **item, "type": kind}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        named["content"] = [{"type": part, "text": item["content"]}]
        if part == "output_text":
            named["content"][0]["annotations"] = []
    if kind != "reasoning":
        named.setdefault("status", "completed")
    return named


def page_of(items: list[dict[str, Any]], query: QueryParams) -> InputItems:
    """The page that the query asks for. Raises InvalidParameter."""
    limit = page_limit(query, _MOST)
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidParameter("order", order[:80], "it must be asc or desc")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidParameter("after", after[:80], "it must be the id of one of the items")
        ordered = ordered[places[0] + 1 :]
    data = ordered[:limit]
    ids = [item["id"] for item in data] or [None]
    return InputItems(data, ids[0], ids[-1], has_more=len(ordered) > len(data))
