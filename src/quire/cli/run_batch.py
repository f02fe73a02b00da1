"""Answer the requests in a file, in the form of OpenAI's batches, and write the results to another.

Run again after an interruption, it does only what has no result yet. Exit codes: 0 every line was
answered, 1 some lines failed (their results say why) or the engine did, 2 wrong usage, 130 and 143
interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.front_end import start_logging
from quire.cli.session import add_engine_flags, explain
from quire.config.args.command_line import add_options
from quire.config.args.engine_args import EngineArgs
from quire.config.args.option import options_of
from quire.config.args.server_args import ServerArgs
from quire.engine.event_loop import loop_factory
from quire.errors import InvalidParameter, NotBuiltYet

if TYPE_CHECKING:
    from tqdm import tqdm

    from quire.engine.client.client import AsyncEngineCoreClient
    from quire.engine.frontend.frontend import FrontEnd
    from quire.server.batch.results import Results
    from quire.server.context import Server

_TERMINATED = 128 + signal.SIGTERM
_SERVER_FLAGS = (
    *("max_body_bytes", "max_completions", "max_stop_strings"),
    *("chat_template_content_format", "trust_request_chat_template"),
    "trust_request_mm_kwargs",
    *("default_chat_template_kwargs", "response_role", "tool_call_parser", "reasoning_parser"),
    *("exclude_tools_when_tool_choice_none", "fingerprint_mode", "fingerprint_value"),
    *("return_tokens_as_token_ids", "enable_prompt_tokens_details"),
    "lora_modules",
    *("host", "port", "metrics_prefix", "uvicorn_log_level", "enable_log_requests"),
)
"""Options of the server that mean something without clients."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire run-batch`."""
    parser.usage = "quire run-batch -i FILE -o FILE [flags]"
    batch = parser.add_argument_group("BatchRun")
    batch.add_argument(
        "-i",
        "--input-file",
        type=Path,
        metavar="FILE",
        help="one request a line: custom_id, method, url, body",
    )
    batch.add_argument("-o", "--output-file", type=Path, metavar="FILE", help="one result a line")
    batch.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="requests at a time (default: twice max_num_seqs)",
    )
    batch.add_argument(
        "--overwrite", action="store_true", help="start over, whatever the output file has"
    )
    batch.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    batch.add_argument(
        "--enable-metrics",
        action="store_true",
        help="serve /metrics, /health and /load at --host and --port meanwhile",
    )
    batch.add_argument("--output-tmp-dir", help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="flags in YAML; those given here rule")
    add_options(parser, ServerArgs, only=_SERVER_FLAGS)
    add_engine_flags(parser, without=options_of(ServerArgs))


def run(args: argparse.Namespace) -> int:
    """Answer what has no result yet, or with --explain print the plan."""
    options = ServerArgs(**{name: vars(args).pop(name) for name in _SERVER_FLAGS})
    options.validate()
    _check(args)
    if args.explain:
        return explain(args)
    from quire.server.batch.lines import check_input, read_lines
    from quire.server.batch.results import open_results

    check_input(args.input_file)
    # before the output is opened, and with --overwrite emptied; two names may be one file
    if args.output_file.exists() and args.output_file.samefile(args.input_file):
        raise InvalidParameter("--output-file", str(args.output_file), "it is the input")
    with open_results(args.output_file, overwrite=args.overwrite) as results:
        lines = read_lines(args.input_file, options.max_body_bytes)
        # counted before the engine starts: a batch that is done needs none
        missing = [results.holds(line) for line in lines].count(False)
        if missing:
            code = _answer(args, options, results, missing)
        else:
            code = 0
            _say(f"All {len(results)} lines have results already.")
        if not code:
            results.put_in_order()
            code = 1 if results.num_failed else 0
            _say(f"{len(results)} results, {results.num_failed} of them errors.")
    return code


def _check(args: argparse.Namespace) -> None:
    for name, value in (("-i", args.input_file), ("-o", args.output_file)):
        if value is None and not args.explain:
            raise InvalidParameter(name, None, "a file must be named")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise InvalidParameter("--max-concurrency", args.max_concurrency, "it must be above 0")
    if args.output_tmp_dir is not None:
        hint = "Leave it out: results are written to --output-file as they come."
        raise NotBuiltYet("--output-tmp-dir", args.output_tmp_dir, hint)


def _answer(args: argparse.Namespace, options: ServerArgs, results: Results, missing: int) -> int:
    """Start the engine and answer what is missing; the exit code of an interruption, or 0."""
    start_logging(options.uvicorn_log_level)
    from quire.engine.launcher import launch_async_front_end
    from quire.server.http.listening import bind

    with ExitStack() as stack:
        listener = None
        if args.enable_metrics:
            listener = stack.enter_context(bind(options.host, options.port, None))
        # after the socket, so that a port that is taken costs no loading of a model
        front_end = launch_async_front_end(EngineArgs.from_cli_args(args))
        stack.callback(front_end.client.shutdown)
        bar = stack.enter_context(_bar(args, missing))
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(_batch(front_end, args, options, results, listener, bar.update))
        except asyncio.CancelledError:
            code = _TERMINATED
        except KeyboardInterrupt:
            code = 130
        else:
            return 0
    _say(f"Interrupted with {len(results)} results; the same command does the rest.")
    return code


async def _batch(
    front_end: FrontEnd[AsyncEngineCoreClient],
    args: argparse.Namespace,
    options: ServerArgs,
    results: Results,
    listener: socket.socket | None,
    on_result: Callable[[], object],
) -> None:
    from quire.engine.async_llm import AsyncLLM
    from quire.server.app import Access, build_app
    from quire.server.assemble import build_server, load_modules
    from quire.server.batch.lines import LineChecker, read_lines
    from quire.server.batch.run import BatchRun
    from quire.server.routes import ROUTES

    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    # a cancelled batch keeps its results and ends its engine
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    engine = AsyncLLM(front_end=front_end, log_requests=options.enable_log_requests)
    plan = engine.vllm_config
    assert plan is not None, "engines for serving are made from plans"
    try:
        server = build_server(engine, engine.tokenizer, plan, options, ())
        await load_modules(server.adapters, options)
        app = build_app(server, Access(), ROUTES)
        checker = LineChecker(options.max_body_bytes)
        lines = read_lines(args.input_file, options.max_body_bytes)
        # beyond the engine's queue they would be refused
        crowd = args.max_concurrency or min(plan.steps.crowd, plan.serving.max_num_queued_reqs)
        async with _measured(server, listener):
            await BatchRun(app, engine, checker, results, on_result).run(lines, crowd)
        if server.texts is not None:
            server.texts.close()
    finally:
        engine.shutdown()


@asynccontextmanager
async def _measured(server: Server, listener: socket.socket | None) -> AsyncIterator[None]:
    """While the block runs, `listener` answers how things go."""
    if listener is None:
        yield
        return
    from quire.server.app import Access, build_app
    from quire.server.http.listening import Listening, address_of, make_listener
    from quire.server.routes import HEALTH_ROUTES

    how = Listening()
    figures = make_listener(build_app(server, Access(), HEALTH_ROUTES), how)
    serving = asyncio.create_task(figures.serve([listener]))
    await figures.accepts.wait()
    _say(f"Metrics at {address_of(listener, how.tls)}/metrics")
    try:
        yield
    finally:
        # a scrape that is under way does not keep the batch from its end
        figures.should_exit = figures.force_exit = True
        await serving


def _bar(args: argparse.Namespace, total: int) -> tqdm[None]:
    """Progress on standard error; a log file gets a line every ten seconds only."""
    from tqdm import tqdm

    pause_s = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, disable=args.disable_tqdm, mininterval=pause_s, unit="line")


def _say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr)
