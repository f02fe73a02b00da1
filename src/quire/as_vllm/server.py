"""vLLM's server in parts, for programs that embed it: the flags, an engine for them, an app."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from quire.config.args.async_engine_args import AsyncEngineArgs
    from quire.config.args.command_line import QuireParser
    from quire.engine.async_llm import AsyncLLM


def api_server() -> int:
    """`quire serve` under the name of vLLM's server."""
    return _command("serve")


def batch_runner() -> int:
    """`quire run-batch` under the name of vLLM's."""
    return _command("run-batch")


def _command(name: str) -> int:
    from quire.cli.main import main

    return main([name, *sys.argv[1:]])


def make_arg_parser(parser: QuireParser) -> QuireParser:
    """Give `parser` the flags of `quire serve`."""
    from quire.cli.serve import add_arguments

    add_arguments(parser)
    return parser


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Raise RequestError for a flag of the server with a value that it may not have."""
    from quire.cli.serve import parts_of

    parts_of(args)


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Serve until a signal comes. Raises InvalidParameter for flags that need processes of their
    own, and for settings of uvicorn.
    """
    from quire.cli.serve import run_here
    from quire.errors import InvalidParameter

    for name, value in uvicorn_kwargs.items():
        hint = "See docs/server.md for the flags, such as --ssl-certfile."
        raise InvalidParameter(name, value, "connections are settings of Quire's own server", hint)
    await run_here(args)


def engine_args_of(args: argparse.Namespace) -> AsyncEngineArgs:
    """The engine's part of the flags of a server."""
    from quire.cli.serve import parts_of
    from quire.config.args.async_engine_args import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(parts_of(args)[1])


@asynccontextmanager
async def build_async_engine_client(
    args: argparse.Namespace, *, usage_context: Any = None
) -> AsyncIterator[AsyncLLM]:
    """An engine for the flags of a server, for the time of the block."""
    given = engine_args_of(args)
    async with build_async_engine_client_from_engine_args(given, usage_context) as engine:
        yield engine


@asynccontextmanager
async def build_async_engine_client_from_engine_args(
    engine_args: AsyncEngineArgs, usage_context: Any = None
) -> AsyncIterator[AsyncLLM]:
    """An engine for the time of the block."""
    from quire.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(engine_args, usage_context=usage_context)
    try:
        yield engine
    finally:
        engine.shutdown()


class EmbeddedApp:
    """The ASGI app of a server; requests are an error before `init_app_state` brings the engine."""

    def __init__(self) -> None:
        self.state = State()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        inner: ASGIApp | None = getattr(self.state, "app", None)
        if inner is None:
            raise RuntimeError("The app has no engine: call init_app_state before it is served.")
        await inner(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answer the events of the program's server; its end ends the processes of the app."""
        for event in ("startup", "shutdown"):
            while (await receive())["type"] != f"lifespan.{event}":
                pass
            if event == "shutdown" and hasattr(self.state, "close"):
                self.state.close()
            await send({"type": f"lifespan.{event}.complete"})

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"The app of the server has no {name!r}: mount it in an app of your own, with your "
            "routes and middleware.",
            name=name,
            obj=self,
        )


def build_app(
    args: argparse.Namespace,
    supported_tasks: Sequence[str] | None = None,
    model_config: object = None,
) -> EmbeddedApp:
    """The app for the flags of a server; what it serves follows from the engine, which has the
    tasks and the model. Raises RequestError for a flag with a value that it may not have.
    """
    validate_parsed_serve_args(args)
    return EmbeddedApp()


async def init_app_state(
    engine_client: AsyncLLM,
    state: State,
    args: argparse.Namespace,
    supported_tasks: Sequence[str] | None = None,
) -> None:
    """Bring the engine by the `state`. Raises RequestError for adapters that cannot be used."""
    from quire.cli.serve import keys_of, parts_of
    from quire.server.serving import make_app

    options, _ = parts_of(args)
    state.app, state.close = await make_app(engine_client, options, keys_of(options))
    state.engine_client, state.args = engine_client, args
    state.vllm_config = engine_client.vllm_config
