"""Routes of plugins: added, left out, and prepared."""

import asyncio
import logging

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from quire.errors import PluginError
from quire.server.endpoint_plugins import EndpointPlugins

GROUP = "quire.endpoint_plugins"
SOURCE = """
    from starlette.responses import PlainTextResponse
    class Greeting:
        name = "greeting"
        required_tasks = None
        def attach_router(self, app):
            app.add_route("/acme", self.greet)
        async def init_state(self, engine_client, state, args):
            state.greeting = f"{engine_client} {args}"
        async def greet(self, request):
            return PlainTextResponse(request.app.state.greeting)
    class Taken(Greeting):
        name = "taken"
        def attach_router(self, app):
            app.add_route("/other", self.greet)
            app.add_route("/health", self.greet, methods=["POST", "GET"])
    class Pooled(Greeting):
        required_tasks = ("embed", "score")
    class Raises(Greeting):
        name = "raises"
        def attach_router(self, app):
            app.add_route("/half", self.greet)
            app.include_router("x")
    class Unready(Greeting):
        name = "unready"
        def init_state(self, *arguments):
            raise OSError("no table")
    def lacking():
        return object()
"""


@pytest.fixture
def install(packages, monkeypatch):
    def install(**members):
        packages.install("acme", SOURCE, {GROUP: members})
        monkeypatch.setenv("VLLM_PLUGINS", ",".join(members))

    return install


async def served(plugins, *paths):
    app = Starlette(routes=[Route("/health", lambda request: PlainTextResponse("well"))])
    plugins.extend(app)
    await plugins.start("engine", "args")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
        replies = [await http.get(path) for path in paths]
    return [(reply.status_code, reply.text) for reply in replies]


def test_a_route_is_served(install):
    install(greeting="Greeting")
    found = asyncio.run(served(EndpointPlugins(["generate"]), "/acme", "/health"))
    assert found == [(200, "engine args"), (200, "well")]


def test_without_being_named_it_is_not_loaded(install, monkeypatch):
    install(greeting="Greeting")
    for value in (None, "others"):
        monkeypatch.delenv("VLLM_PLUGINS")
        if value is not None:
            monkeypatch.setenv("VLLM_PLUGINS", value)
        assert asyncio.run(served(EndpointPlugins(["generate"]), "/acme"))[0][0] == 404
        monkeypatch.setenv("VLLM_PLUGINS", "")


def test_those_that_cannot_be_served_are_left_out_whole(install, caplog):
    install(greeting="Greeting", taken="Taken", pooled="Pooled", raises="Raises", bad="lacking")
    paths = ("/acme", "/health", "/other", "/half")
    found = asyncio.run(served(EndpointPlugins(["generate"]), *paths))
    assert [code for code, _ in found] == [200, 200, 404, 404] and found[1][1] == "well"
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    ends = "The server goes on without it."
    assert said == [
        "Endpoint plugin pooled is left out: it needs one of embed, score, and generate are "
        f"served. {ends}",
        "Endpoint plugin bad is left out: its object lacks name, required_tasks, attach_router, "
        f"init_state. {ends}",
        f"Endpoint plugin taken is left out: GET /health is a route already, and cannot be "
        f"replaced. {ends}",
        "Endpoint plugin raises is left out: AttributeError: 'Starlette' object has no attribute "
        f"'include_router'. {ends}",
    ]


def test_one_that_is_not_ready_keeps_the_server_from_starting(install):
    install(unready="Unready")
    with pytest.raises(PluginError, match="plugin unready: init_state failed: OSError: no table"):
        asyncio.run(served(EndpointPlugins(["generate"])))
