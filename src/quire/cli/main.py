"""The `quire` command: finds the subcommand, runs it, and turns errors into one line and an exit
code.

Exit codes: 0 done, 1 failed while running, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TextIO

from quire.cli.start_signals import StoppedWhileStarting, start_signals
from quire.config.args.command_help import meant
from quire.config.args.command_line import QuireParser
from quire.file_errors import naming
from quire.start_up import quick_imports

COMMANDS = {
    "generate": "continue a prompt",
    "chat": "talk to a model, here or on a server",
    "complete": "continue texts, here or on a server",
    "serve": "answer over HTTP, as OpenAI's API does",
    "run-batch": "answer the requests in a file",
    "quantize": "round a checkpoint's weights, and write it",
    "show": "print what a model is made of",
    "doctor": "print what this machine offers",
    "bench": "measure: throughput, latency, serve, startup, ...",
}

_OUTPUT = "standard output"
_INSTEAD = {"collect-env": ": quire doctor prints what this machine offers"}
"""Commands of vLLM's that have another name here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (default: the process's) and give the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # first of all: the next file that is opened would become a standard stream
    is_heard = _open_standard_streams()
    _tolerate_unprintable_text()
    # those two write nothing to it
    if not is_heard and words[:1] not in (["serve"], ["run-batch"]):
        _say("error: standard output is closed")
        return 1
    if not words or words[0] not in COMMANDS:
        return _no_command(words)
    try:
        with start_signals.taken() if words[0] == "serve" else nullcontext():
            return run_command(words[0], words[1:])
    except StoppedWhileStarting:
        _say("stopped while starting")
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone, as in `quire show | head`.
        _drop_output()
        return 0


def run_command(name: str, words: Sequence[str]) -> int:
    """Parse the words of one command and run it; an error becomes a line on stderr."""
    # importing makes many objects, none of which is garbage
    with quick_imports():
        module = importlib.import_module(f"quire.cli.{name.replace('-', '_')}")
    parser = QuireParser(prog=f"quire {name}", description=module.__doc__)
    module.add_arguments(parser)
    args = parser.parse_with_config(words)
    from quire.environment import read_environment
    from quire.errors import RequestError

    debug = False
    try:
        environment = read_environment()
        debug = environment.debug
        for unknown in environment.unknown:
            _say(f"warning: {unknown} is not a variable of Quire's; see docs/engine_args.md")
        code: int = module.run(args)
        # here, where an error still becomes a line and an exit code
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.filename == _OUTPUT:
            _drop_output()
        _say(f"error: {describe_error(error)}")
        return 2 if isinstance(error, RequestError) else 1
    return code


def describe_error(error: Exception) -> str:
    """One line about what went wrong; what is not an error of ours is named and can be traced."""
    from quire.errors import EngineError

    text = " ".join(str(error).split())
    if isinstance(error, EngineError):
        return text
    return f"{type(error).__name__}: {text} (QUIRE_DEBUG=1 shows where)"


def _drop_output() -> None:
    """Have what was not written go nowhere, so that the interpreter does not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_command(words: list[str]) -> int:
    parser = QuireParser(prog="quire", description="Run large language models on this machine.")
    parser.add_argument("-v", "--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help, add_help=False)
    if words and not words[0].startswith("-"):
        instead = _INSTEAD.get(words[0], "") or meant(words[0], COMMANDS)
        parser.error(f"unknown command {words[0]!r}{instead}")
    args = parser.parse_args(words)
    if args.version:
        from quire import __version__

        print(__version__)
        return 0
    parser.print_help(sys.stderr)
    return 2


def _say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr)


def _open_standard_streams() -> bool:
    """Have the null device where the standard streams are closed (`>&-`), so that nothing else gets
    their descriptors; whether standard output was open.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # the lowest number that is free
    is_heard = sys.stdout is not None
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _named_output(sys.stdout)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    return is_heard


class _NamedOutput(io.FileIO):
    """Standard output, whose errors say that they are its own."""

    def write(self, data: Any) -> int:
        with naming(_OUTPUT):
            return super().write(data)


def _named_output(stream: io.TextIOWrapper) -> TextIO:
    """`stream`, which is standard output, with errors that name it, as of a full disk."""
    raw = _NamedOutput(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        # a stream that writes through has no buffer, which would keep what it is given
        raw if stream.write_through else io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _tolerate_unprintable_text() -> None:
    """A terminal that knows few characters shows a mark for the others; the program goes on."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
