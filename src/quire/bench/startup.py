"""Seconds from the start of a process to its first token, and where they go.

Every trial is a new process; one before them fills the page cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time

from quire.bench.report import add_output_flag, at_least, finish
from quire.bench.workload import add_model_flags, engine_args_from, model_id
from quire.config.args.engine_args import EngineArgs
from quire.config.args.option import default_of
from quire.errors import LoadError

PARTS = ("interpreter", "planning", "imports", "engine", "first step")
"""Parts of a start. Planning imports all that needs no torch, which the imports after it are."""
BUILDER_PARTS = ("weights", "kv_memory", "recording")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire bench startup`."""
    parser.usage = "quire bench startup [flags]"
    parser.add_argument(
        "--num-trials", type=at_least(1), default=5, help="processes; medians count"
    )
    add_output_flag(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Start again and again and print the medians."""
    engine_args = engine_args_from(args)
    plan = engine_args.create_engine_config()  # errors are raised here, not in a child
    # the first one reads files that are not in the page cache
    trials = [one_start(engine_args) for _ in range(args.num_trials + 1)][1:]
    medians = {name: statistics.median(t[name] for t in trials) for name in trials[0]}
    figures = {
        "model_id": model_id(args, plan),
        "num_trials": args.num_trials,
        "seconds": medians,
        "ready_time": medians["ready"],
        "elapsed_time": medians["first token"],
        "trials": trials,
    }
    for name in PARTS:
        print(f"{name:12} {medians[name]:7.3f} s")
        if name == "engine":
            for part in BUILDER_PARTS:
                print(f"  {part:10} {medians[part]:7.3f} s")
    print(f"ready after {medians['ready']:.3f} s, first token after {medians['first token']:.3f} s")
    finish(figures, args.output_json)
    return 0


def one_start(engine_args: EngineArgs) -> dict[str, float]:
    """The seconds of one process: parts, `ready` and `first token` since its start.

    Raises LoadError with the last line on the process's standard error, if it failed.
    """
    given = {
        field.name: getattr(engine_args, field.name)
        for field in dataclasses.fields(engine_args)
        if getattr(engine_args, field.name) != default_of(field)
    }
    words = [sys.executable, "-m", "quire.bench.first_token", json.dumps(given)]
    start = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no error message"]
        raise LoadError(f"A process that was to start an engine failed: {lines[-1]}")
    # the last line: libraries may print before it
    answer = json.loads(done.stdout.splitlines()[-1])
    moments = [start, *answer["moments"].values()]
    steps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    return {
        **dict(zip(PARTS, steps, strict=True)),
        **answer["parts"],
        "ready": answer["moments"]["ready"] - start,
        "first token": moments[-1] - start,
    }
