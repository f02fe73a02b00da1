"""`/openapi.json` and `/docs`, from the table of routes. The page needs nothing from outside."""

from __future__ import annotations

import asyncio
import html
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quire.server.context import Server
from quire.server.http.failures import JSON
from quire.server.http.json_body import json_response
from quire.server.http.openapi import document

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, summary { font-family: ui-monospace, monospace; }
summary { cursor: pointer; padding: .3rem 0; }
table { border-collapse: collapse; margin: .5rem 0 1rem 1rem; }
td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
"""


async def openapi(server: Server, request: Request) -> Response:
    """The OpenAPI document of this server."""
    made = await asyncio.to_thread(document, request.app.state.entries)
    return json_response(made)


async def docs(server: Server, request: Request) -> Response:
    """The document to be read in a browser."""
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    made = await asyncio.to_thread(document, request.app.state.entries)
    return HTMLResponse(page(made), headers=policy)


def page(document: dict[str, Any]) -> str:
    """The document as a page of its own."""
    components = document["components"]["schemas"]
    routes = [
        _section(method, path, operation, components)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    info = document["info"]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{info['title']}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>{info['title']} {html.escape(info['version'])}</h1>"
        f"<p><a href=openapi.json>openapi.json</a></p>{''.join(routes)}</html>"
    )


def _section(method: str, path: str, operation: dict[str, Any], components: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {})
    fields = components.get(body.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(_kind(schema))}"
        for name, schema in fields.items()
    )
    return (
        f"<details><summary><b>{method.upper()}</b> {html.escape(path)}</summary>"
        f"<p>{html.escape(operation['summary'])}</p><table>{rows}</table></details>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        kinds = [_kind(part) for part in schema["anyOf"]]
        return " or ".join(kind for kind in dict.fromkeys(kinds) if kind != "null")
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "anything"))
    items = schema.get("items")
    return f"list of {_kind(items)}" if kind == "array" and isinstance(items, dict) else kind
