"""One server from its first connection to its last: built, watched, stopped."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp

from quire.config.args.server_args import ServerArgs
from quire.engine.async_llm import AsyncLLM
from quire.server.app import Access, build_app
from quire.server.assemble import Siblings, access_of, build_server, listening_of, load_modules
from quire.server.context import RouteEntry, Server
from quire.server.endpoint_plugins import EndpointPlugins
from quire.server.http.acceptor import most_connections
from quire.server.http.listening import ShutdownSignal, address_of, listen, make_listener
from quire.server.page.history import keep_history
from quire.server.routes import HEALTH_ROUTES, ROUTES, TOKENIZER_INFO, TOKENS_OUT

_MOST_ADMINISTRATORS = 16
"""Connections to the port of the administration, besides streams that are taken over."""
_TAKEN_SHARE = 4
"""Share of all connections for streams taken over, one each, where clients have another port."""

_SWITCH_S = 0.5e-3
"""The longest that a thread keeps the interpreter when the loop wants it, which is after every
write to a stream. Python's own 5 ms are as long as a step.
"""

logger = logging.getLogger(__name__)


async def serve(
    engine: AsyncLLM,
    args: ServerArgs,
    keys: Sequence[str],
    listener: socket.socket,
    ending: ShutdownSignal,
    admin_listener: socket.socket | None = None,
    siblings: Siblings | None = None,
) -> int:
    """Answer requests at `listener` until `ending` begins or the engine dies; the exit code. Raises
    what keeps the engine from starting.

    The routes that control the engine are at `admin_listener`, or with the others. The caller keeps
    the engine.
    """
    siblings = siblings or Siblings()
    sys.setswitchinterval(_SWITCH_S)
    plan = engine.vllm_config
    assert plan is not None, "engines for serving are made from plans"
    server = build_server(engine, engine.tokenizer, plan, args, keys, siblings)
    await load_modules(server.adapters, args)
    how, access = listening_of(args), access_of(args, keys)
    with_admin = args.enable_admin and admin_listener is None
    app = await _public_app(server, access, args, with_admin=with_admin)
    # two apps over one server: what controls the engine is not reachable where clients are
    most, most_taken = most_connections(), 0
    if admin_listener is not None and not server.in_flight.has_neighbours:
        most_taken = most // _TAKEN_SHARE
    served = [(make_listener(app, how, most - most_taken), listener)]
    if admin_listener is not None:
        app = build_app(server, access, (*HEALTH_ROUTES, *_admin_routes()))
        limit = _MOST_ADMINISTRATORS + most_taken
        served.append((make_listener(app, how, limit), admin_listener))

    def begin() -> None:
        if siblings.on_started is not None:
            siblings.on_started(server)
        elif not engine.is_loading:
            announce()
        else:
            logger.info(
                "Loading %s; requests at %s wait for it.",
                plan.model.served_model_names[0],
                address_of(listener, how.tls),
            )

    def announce() -> None:
        if admin_listener is not None:
            logger.info("Administration at %s", address_of(admin_listener, how.tls))
        logger.info("Output parsing: %s", server.chat.parser_plan.described)
        logger.info(
            "Serving %s at %s", plan.model.served_model_names[0], address_of(listener, how.tls)
        )

    async def drain() -> None:
        server.in_flight.is_draining = True
        await server.in_flight.wait_until_idle()

    async def abort() -> None:
        await engine.abort(server.in_flight.keys())

    async def watch() -> None:
        # connections are accepted while the model loads: requests queue, and probes get 503 in
        # place of a refused connection
        if engine.is_loading:
            await engine.wait_until_started()
            announce()
        await engine.wait_until_dead()
        logger.error("The engine is dead: %s", engine.dead_error)

    watching = asyncio.create_task(watch())
    # so that a server whose engine has died for good can be restarted
    watching.add_done_callback(lambda task: None if task.cancelled() else ending.fail())
    history = asyncio.create_task(keep_history(server, has_gpu=plan.parallel.has_gpu))
    try:
        await listen(
            served,
            ending,
            on_started=begin,
            drain=drain,
            abort=abort,
            drain_s=args.shutdown_timeout,
        )
    finally:
        watching.cancel()
        history.cancel()
        server.close()
    if watching.done():
        # only after everything is closed, so that the error is the last line of the log
        watching.result()  # raises what kept the engine from starting
    logger.info("Stopped.")
    return ending.exit_code


async def make_app(
    engine: AsyncLLM, args: ServerArgs, keys: Sequence[str]
) -> tuple[ASGIApp, Callable[[], None]]:
    """The app of a server that somebody else runs, and what ends processes that it has started."""
    plan = engine.vllm_config
    assert plan is not None, "engines for serving are made from plans"
    server = build_server(engine, engine.tokenizer, plan, args, keys)
    await load_modules(server.adapters, args)
    app = await _public_app(server, access_of(args, keys), args, with_admin=args.enable_admin)
    history = asyncio.create_task(keep_history(server, has_gpu=plan.parallel.has_gpu))

    def close() -> None:
        history.cancel()
        server.close()

    return app, close


async def _public_app(
    server: Server, access: Access, args: ServerArgs, *, with_admin: bool
) -> ASGIApp:
    """The app with the routes of plugins. Raises PluginError."""
    plugins = EndpointPlugins(server.abilities.tasks)
    routes = _routes(args, with_admin=with_admin)
    app = build_app(server, access, routes, plugins.extend)
    await plugins.start(server.engine, args)
    return app


def _routes(args: ServerArgs, *, with_admin: bool) -> list[RouteEntry]:
    routes = list(ROUTES)
    if args.enable_tokenizer_info_endpoint:
        routes.append(TOKENIZER_INFO)
    if args.enable_scale_out:
        routes.append(TOKENS_OUT)
    if with_admin:
        routes += _admin_routes()
    return routes


def _admin_routes() -> Sequence[RouteEntry]:
    # few servers can be controlled over HTTP
    from quire.server.admin import ADMIN_ROUTES
    from quire.server.control.drain import DRAIN_ROUTES
    from quire.server.control.weight_routes import WEIGHT_ROUTES

    return (*ADMIN_ROUTES, *DRAIN_ROUTES, *WEIGHT_ROUTES)
