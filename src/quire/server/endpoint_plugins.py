"""Routes of plugins: the group `endpoint_plugins`, whose members are loaded where VLLM_PLUGINS
names them.

A plugin is a function without arguments, or a class, that makes an object with `name`,
`required_tasks` (None: any; else one of them has to be served), `attach_router(app)` and
`init_state(engine_client, state, args)`, which may be a coroutine. The keys and limits of the other
routes apply to its own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.routing import BaseRoute, Match

from quire.errors import PluginError
from quire.plugins import load_group

logger = logging.getLogger(__name__)

GROUP = "endpoint_plugins"
_PARTS = ("name", "required_tasks", "attach_router", "init_state")


class EndpointPlugin(Protocol):
    """Adds routes to a server."""

    name: str
    required_tasks: Sequence[str] | None

    def attach_router(self, app: Starlette) -> None:
        """Add routes to the app: `app.add_route(path, handler, methods=[...])`, or `app.mount`."""

    def init_state(self, engine_client: Any, state: State, args: Any) -> object:
        """Prepare what its handlers need, in `request.app.state`, before the first request."""


class EndpointPlugins:
    """The plugins of one app. One that raises while it is made or adds its routes, or adds a route
    that is there already, is named in the log and left out with all of its routes.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        """Make those that serve one of these tasks."""
        self._plugins: list[EndpointPlugin] = []
        self._app: Starlette | None = None
        for name, factory in load_group(GROUP).items():
            try:
                plugin = _made(name, factory)
                wanted = plugin.required_tasks
                if wanted is not None and not set(wanted) & set(tasks):
                    needs = (
                        f"it needs one of {', '.join(wanted)}, and {', '.join(tasks)} are served"
                    )
                    raise PluginError(needs)
            except Exception as error:
                _leave_out(name, error)
            else:
                self._plugins.append(plugin)

    def extend(self, app: Starlette) -> None:
        """Add their routes to the app."""
        self._app = app
        for plugin in tuple(self._plugins):
            before = list(app.router.routes)
            try:
                plugin.attach_router(app)
                _check_new(before, app.router.routes[len(before) :])
            except Exception as error:
                # what it had added before it failed goes too
                app.router.routes[:] = before
                self._plugins.remove(plugin)
                _leave_out(plugin.name, error)

    async def start(self, engine: Any, args: Any) -> None:
        """Let them prepare. Raises PluginError where one fails: its routes are there already."""
        assert self._app is not None, "they have been added"
        for plugin in self._plugins:
            try:
                result = plugin.init_state(engine, self._app.state, args)
                if inspect.isawaitable(result):
                    await result
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                text = f"Endpoint plugin {plugin.name}: init_state failed: {what}"
                raise PluginError(text) from error


def _made(name: str, factory: Callable[[], Any]) -> EndpointPlugin:
    plugin: EndpointPlugin = factory()
    lacking = [part for part in _PARTS if not hasattr(plugin, part)]
    if lacking:
        raise PluginError(f"its object lacks {', '.join(lacking)}")
    return plugin


def _check_new(before: Sequence[BaseRoute], added: Sequence[BaseRoute]) -> None:
    for route in added:
        path = getattr(route, "path", "")
        for method in sorted(getattr(route, "methods", None) or ["GET"]):
            scope = {"type": "http", "path": path, "method": method, "headers": []}
            # the first match answers, so a second route would be silently dead
            if any(other.matches(scope)[0] is Match.FULL for other in before):
                raise PluginError(f"{method} {path} is a route already, and cannot be replaced")


def _leave_out(name: str, error: Exception) -> None:
    what = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
    logger.error("Endpoint plugin %s is left out: %s. The server goes on without it.", name, what)
