"""The page at `/`: a chat, or the nearest of texts, and a dashboard, without other resources."""

from __future__ import annotations

import base64
import hashlib
from functools import cache

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quire.server.abilities import Ability
from quire.server.context import Server

_SCRIPTS = (
    "server.js",
    "nodes.js",
    "drawing.js",
    "conversations.js",
    "odds.js",
    "transcript.js",
    "settings.js",
    "composer.js",
    "chat.js",
    "history.js",
    "nearest.js",
    "dashboard.js",
    "page.js",
)
"""Scripts of the page, in the order in which they run: they share one scope."""


_CAN = '<body data-can="generate">'
_SHOWN: tuple[Ability, ...] = ("generate", "score")
"""The abilities that have a view."""


async def page(server: Server, request: Request) -> Response:
    """A page to talk to the model and to watch the server, for a browser."""
    text, policy = _document()
    can = " ".join(ability for ability in _SHOWN if server.abilities.have(ability))
    # not in the cached document: it depends on the server, and a process may have several
    text = text.replace(_CAN, f'<body data-can="{can}">')
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


@cache
def _document() -> tuple[str, str]:
    """The document, and the policy that lets a browser run only what is in it."""
    style = _read("page.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    text = _read("index.html")
    text = text.replace("/* page.css */", style).replace("/* scripts */", script)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)};"
        " connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none';"
        " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return text, policy


def _read(name: str) -> str:
    from importlib.resources import files  # takes time to import, and few ask for the page

    return (files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
