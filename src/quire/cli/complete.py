"""Continue texts, one after the other, by a model in this process or by a server (--url).

Continuations stream; Ctrl-C ends one, Ctrl-D the command. `quire generate` does one prompt, with
more ways to read it and to print what comes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from quire.cli.answers import PASSING, Model, go_on_after, lines, raise_interrupt, show
from quire.cli.model_choice import add_answer_flags, open_model
from quire.cli.session import explain
from quire.config.args.command_line import QuireParser

_MAX_TOKENS = 128


def add_arguments(parser: QuireParser) -> None:
    """The flags of `quire complete`."""
    parser.usage = "quire complete [flags]"
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="continue this one text and stop")
    add_answer_flags(parser, ("quick",))


def run(args: argparse.Namespace) -> int:
    """Continue line by line until the input ends, or with --explain print the plan."""
    if args.explain:
        return explain(args)
    with open_model(args, _MAX_TOKENS) as (model, sampling):
        if args.quick is not None:
            raise_interrupt(show(model.complete(args.quick, sampling), stats=args.stats))
        else:
            converse(model, sampling, stats=args.stats)
    return 0


def converse(model: Model, sampling: Mapping[str, Any], *, stats: bool) -> None:
    """Continue each line; print an error for a line that fails, and go on with the next."""
    for prompt in lines("Begin a text."):
        if not prompt:
            continue
        try:
            go_on_after(show(model.complete(prompt, sampling), stats=stats))
        except PASSING as error:
            print(f"({error})", file=sys.stderr)
