"""A local server without a key and the web pages of others."""

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from quire.config.args.server_args import ServerArgs
from quire.server.assemble import access_of
from quire.server.http.browser_guard import BrowserGuard


def status(method="POST", *, hosts=(), origins=(), **headers):
    app = BrowserGuard(PlainTextResponse("served"), hosts, origins)

    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
            return await http.request(method, "/", headers=headers)

    reply = asyncio.run(ask())
    if reply.status_code == 403:
        assert reply.json()["error"]["message"].count("--allowed-") == 1
    return reply.status_code


OWN = [
    "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "localhost:8000", "LOCALHOST", "a.localhost:1",
    "quire:8000", "192.168.0.7", "gpu.local", "quire.default.svc.cluster.local:80",
    "host.docker.internal:8000", "localhost.",
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
    "local.evil", "a@b.c", "[::1", "1.2.3.4.5", "xn--lcalhost-54a.com",
]  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_names_that_no_page_can_have_are_served(host):
    assert status(host=host) == status("GET", host=host) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_a_page_can_have_is_refused(host):
    assert status(host=host) == status("GET", host=host) == 403


def test_named_hosts_are_served():
    assert status(host="llm.example.org:443", hosts=["LLM.example.org"]) == 200
    assert status(host="evil.example", hosts=["*"]) == 200
    assert status(host="evil.example", hosts=["llm.example.org"]) == 403


@pytest.mark.parametrize(
    ("origin", "right"),
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("http://localhost:3000", 403),
        ("http://localhost", 403),
        ("https://evil.example", 403),
        ("http://good.example", 200),
        ("null", 200),
        ("app://desk", 200),
    ],
)
def test_pages_of_other_origins_change_nothing(origin, right):
    given = {"host": "localhost:8000", "origin": origin, "origins": ["http://good.example"]}
    assert status(**given) == status("DELETE", **given) == right
    assert status("GET", **given) == status("OPTIONS", **given) == 200
    assert status(host="localhost:8000", origin=origin, origins=["*"]) == 200


@pytest.mark.parametrize(
    ("options", "guarded"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "box.example.org"}, False),
        ({"uds": "/tmp/socket"}, False),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}, False),
    ],
)
def test_where_it_guards(options, guarded):
    args = ServerArgs(allowed_hosts="llm.example.org", **options)
    assert access_of(args, []).hosts == (["llm.example.org"] if guarded else None)
    assert access_of(args, ["key"]).hosts is None
