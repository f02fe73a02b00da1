"""Measure this engine on this machine, as a whole or in parts.

`quire bench COMMAND --help` lists the flags of each.
"""

from __future__ import annotations

import argparse
import importlib

from quire.config.args.command_line import QuireParser

_COMMANDS = {
    "scheduler": "the cost of deciding what runs, without a model",
    "throughput": "tokens per second of many requests at once",
    "latency": "seconds for one batch from start to end",
    "speculation": "what drafts are worth, by batch size and temperature",
    "serve": "a server under load",
    "startup": "seconds from a process's start to its first token",
    "overhead": "what the engine costs around a tiny model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name of the measurement; its flags are read by its own module."""
    what = "; ".join(f"{name}: {help}" for name, help in _COMMANDS.items())
    parser.add_argument("measurement", choices=_COMMANDS, help=what)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the measurement")


def run(args: argparse.Namespace) -> int:
    """Hand over to the measurement."""
    module = importlib.import_module(f"quire.bench.{args.measurement}")
    parser = QuireParser(prog=f"quire bench {args.measurement}", description=module.__doc__)
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(args.flags))
    return code
