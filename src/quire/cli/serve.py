"""Answer over HTTP, as OpenAI's API does.

SIGTERM and Ctrl-C let running requests end (--shutdown-timeout); a second one ends them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from quire.cli.front_end import start_logging
from quire.cli.session import add_engine_flags, explain
from quire.cli.start_signals import start_signals
from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.config.args.command_line import QuireParser
from quire.config.args.option import options_of
from quire.config.args.server_args import ServerArgs, check_keys
from quire.engine.event_loop import freeze_start_up, loop_factory
from quire.environment import read_environment
from quire.errors import InvalidParameter
from quire.start_up import quick_imports

if TYPE_CHECKING:
    from quire.engine.client.client import AsyncEngineCoreClient
    from quire.engine.frontend.frontend import FrontEnd

logger = logging.getLogger(__name__)

_FIRST_FLAGS = {
    "Model": (
        *("model_tag", "served_model_name", "dtype", "quantization", "max_model_len"),
        *("hf_overrides", "device"),
    ),
    "Serving": ("host", "port", "api_key", "allowed_origins", "config"),
    "Memory and batching": (
        *("gpu_memory_utilization", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens"),
        "data_parallel_size",
    ),
    "Chat": ("chat_template", "tool_call_parser", "reasoning_parser"),
}
"""The flags that `quire serve --help` lists."""


def add_arguments(parser: QuireParser) -> None:
    """The flags of `quire serve`."""
    with quick_imports():
        from quire.server.output_parsing import REASONING_PARSERS, TOOL_PARSERS

    parser.usage = "quire serve [MODEL] [flags]"
    parser.epilog = (
        f"--tool-call-parser knows {', '.join(sorted(TOOL_PARSERS))}; "
        f"--reasoning-parser {', '.join(sorted(REASONING_PARSERS))}."
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="flags in YAML; those given here rule")
    ServerArgs.add_cli_args(parser)
    add_engine_flags(parser, AsyncEngineArgs, without=options_of(ServerArgs))
    parser.first_flags = _FIRST_FLAGS


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes, or with --explain print the plan."""
    options, of_engine = parts_of(args)
    if args.explain:
        return explain(of_engine, AsyncEngineArgs)
    engine_args = AsyncEngineArgs.from_cli_args(of_engine)
    if options.headless:
        from quire.engine.data_parallel.headless import run_headless

        start_logging(options.uvicorn_log_level)
        return run_headless(engine_args)
    keys = keys_of(options)
    start_logging(options.uvicorn_log_level)
    with quick_imports():
        from quire.server.assemble import listening_of
        from quire.server.http.acceptor import raise_descriptor_limit
        from quire.server.http.listening import bind, bind_shared, check_tls

    # before the engine, which may take minutes to load
    check_tls(listening_of(options).tls)
    # before processes are started, which inherit the limit
    raise_descriptor_limit()

    with ExitStack() as stack:
        if engine_args.data_parallel_multi_port_external_lb:
            return _serve_at_ports(engine_args, options, keys, stack)
        address = options.host, options.port, options.uds
        if options.num_api_servers > 1:
            listeners = bind_shared(*address, options.num_api_servers)
        else:
            listeners = [bind(*address)]
        for listener in listeners:
            stack.enter_context(listener)
        admin = None
        if options.enable_admin and options.admin_port is not None:
            admin = stack.enter_context(bind(None, options.admin_port, None))
        _warn_if_open(options, keys)
        start_signals.check()
        if len(listeners) > 1:
            from quire.server.fleet.fleet import serve_with_many

            return serve_with_many(engine_args, options, keys, listeners, admin)
        # imports go on while the plan is made
        with quick_imports(lasting=True):
            from quire.engine.launcher import launch_async_front_end

            front_end = launch_async_front_end(engine_args, waits=False)
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(_serve(front_end, options, keys, listeners[0], admin))
        finally:
            front_end.client.shutdown()


def _serve_at_ports(
    engine_args: AsyncEngineArgs, options: ServerArgs, keys: tuple[str, ...], stack: ExitStack
) -> int:
    """A server for each copy of this machine, at ports from `options.port` on."""
    name = "data_parallel_multi_port_external_lb"
    for other, is_given in (
        ("uds", options.uds is not None),
        ("port", not options.port),
        ("api_server_count", options.num_api_servers > 1),
        ("admin_port", options.admin_port is not None),
    ):
        if is_given:
            allowed = f"each copy has one server, at a port that follows from --port: no {other}"
            hint = "Give --port alone; --enable-admin serves those routes with the others."
            raise InvalidParameter(name, True, allowed, hint)
    from quire.server.fleet.port_servers import serve_at_ports
    from quire.server.http.listening import bind

    plan = engine_args.create_engine_config()
    ports = [options.port + place for place, _ in enumerate(plan.parallel.data_parallel_ranks)]
    ports.append(options.data_parallel_supervisor_port)
    *listeners, health = (stack.enter_context(bind(options.host, port, None)) for port in ports)
    _warn_if_open(options, keys)
    start_signals.check()
    return serve_at_ports(plan, options, keys, listeners, health)


def parts_of(args: argparse.Namespace) -> tuple[ServerArgs, argparse.Namespace]:
    """The options of the server, checked, and what is left for the engine."""
    options = ServerArgs.from_cli_args(args)
    options.validate()
    from quire.plugins import load_general_plugins
    from quire.server.output_parsing import choose_parsers

    # before the check, since plugins may add parsers
    load_general_plugins()
    choose_parsers(options.tool_call_parser, options.reasoning_parser, None)  # the names exist
    own = options_of(ServerArgs)
    rest = {name: value for name, value in vars(args).items() if name not in own}
    rest["model"] = args.model_tag or args.model
    return options, argparse.Namespace(**rest)


def keys_of(options: ServerArgs) -> tuple[str, ...]:
    """The API keys of the flags and of the environment."""
    of_environment = read_environment().api_keys
    check_keys("QUIRE_API_KEY", of_environment)
    keys = (*options.keys, *of_environment)
    if options.enable_admin and not keys:
        raise InvalidParameter("enable_admin", True, "those routes need a key", "Give --api-key.")
    return keys


async def run_here(args: argparse.Namespace) -> int:
    """`run` in an event loop that runs already: one API server, until a signal comes.

    Raises InvalidParameter for flags that need processes of their own.
    """
    options, of_engine = parts_of(args)
    for name, is_given in (
        ("headless", options.headless),
        ("api_server_count", options.num_api_servers > 1),
        ("admin_port", options.admin_port is not None),
        ("data_parallel_multi_port_external_lb", args.data_parallel_multi_port_external_lb),
        ("explain", args.explain),
    ):
        if is_given:
            allowed = "this server is part of a program"
            raise InvalidParameter(name, vars(args)[name], allowed, "Use the command quire serve.")
    keys = keys_of(options)
    from quire.engine.launcher import launch_async_front_end
    from quire.server.http.listening import bind

    with bind(options.host, options.port, options.uds) as listener:
        _warn_if_open(options, keys)
        front_end = launch_async_front_end(AsyncEngineArgs.from_cli_args(of_engine), waits=False)
        try:
            return await _serve(front_end, options, keys, listener, None)
        finally:
            front_end.client.shutdown()


async def _serve(
    front_end: FrontEnd[AsyncEngineCoreClient],
    options: ServerArgs,
    keys: tuple[str, ...],
    listener: socket.socket,
    admin: socket.socket | None,
) -> int:
    with quick_imports(lasting=True):
        from quire.engine.async_llm import AsyncLLM
        from quire.server.http.listening import ShutdownSignal
        from quire.server.serving import serve

    engine = AsyncLLM(front_end=front_end, log_requests=options.enable_log_requests)
    # what start-up has made lives as long as the server: the collector need not look at it again
    freeze_start_up()
    try:
        ending = ShutdownSignal()
        with ending.by_signals():
            start_signals.check()
            return await serve(engine, options, keys, listener, ending, admin)
    finally:
        engine.shutdown()


def _warn_if_open(options: ServerArgs, keys: tuple[str, ...]) -> None:
    is_local = options.uds is not None or options.host in (None, "127.0.0.1", "::1", "localhost")
    if not keys and not is_local:
        logger.warning(
            "Anyone who can reach %s can use this server: set --api-key, or --host 127.0.0.1.",
            options.host,
        )
