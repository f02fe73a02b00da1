"""Measure this engine on this machine, as a whole or in parts.

`quire bench COMMAND --help` lists the flags of each.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from types import ModuleType

from quire.config.args.command_line import QuireParser

_COMMANDS = {
    "throughput": "tokens per second of many requests at once",
    "latency": "seconds for one batch from start to end",
    "serve": "a server under load",
    "startup": "seconds from a process's start to its first token",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name of the measurement; its flags are read by its own module."""
    what = "; ".join(f"{name}: {help}" for name, help in _COMMANDS.items())
    parser.add_argument("measurement", choices=_COMMANDS, help=what)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the measurement")


def run(args: argparse.Namespace) -> int:
    """Hand over to the measurement."""
    module = importlib.import_module(f"quire.bench.{args.measurement}")
    return run_measurement(module, f"quire bench {args.measurement}", args.flags)


def run_measurement(module: ModuleType, prog: str, words: Sequence[str] | None = None) -> int:
    """Runs a module that has `add_arguments` and `run` with the words of a command line (None:
    those of this process) -> its exit code. The scripts of benchmarks/ are run by it, too.
    """
    parser = QuireParser(prog=prog, description=module.__doc__)
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(words))
    return code
