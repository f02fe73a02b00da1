"""Put loads on servers with one set of parameters after the other, and compare.

A server is started for each set of --serve-params, and `bench serve` runs for each set of
--bench-params against it, --num-runs times. An interrupted sweep goes on with --resume.

    python -m benchmarks.sweep --serve-param max-num-seqs=16,64 --bench-param max-concurrency=1,16
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.sweeping.sweep_commands import Commands
from benchmarks.sweeping.sweep_grid import ParameterSet, pairs_of, parse_links, read_sets
from benchmarks.sweeping.sweep_report import Run, plot_summary, table, write_report
from benchmarks.sweeping.sweep_server import CommandFailed, end, last_lines, running_server, start
from quire.config.args.command_line import QuireParser
from quire.errors import InvalidParameter


def main(words: Sequence[str] | None = None) -> int:
    """Sweep as the command line says (default: the process's); the exit code."""
    parser = QuireParser(prog="python -m benchmarks.sweep", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(words)
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
    except InvalidParameter as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    what = parser.add_argument_group("commands")
    what.add_argument("--serve-cmd", default="quire serve", help="starts the server")
    what.add_argument("--bench-cmd", default="quire bench serve", help="puts the load on it")
    what.add_argument("--after-bench-cmd", metavar="CMD", help="run after each run of the load")
    what.add_argument("--show-stdout", action="store_true", help="show what the commands print")
    what.add_argument("--server-ready-timeout", type=float, default=300, metavar="S")
    sets = parser.add_argument_group("parameters")
    for side, whom in (("serve", "the server"), ("bench", "the load")):
        sets.add_argument(
            f"--{side}-params", type=Path, metavar="FILE", help=f"sets for {whom}, JSON or YAML"
        )
        sets.add_argument(
            f"--{side}-param",
            action="append",
            default=[],
            metavar="NAME=V,V",
            help="each of these values, with every set; may be given several times",
        )
    sets.add_argument("--link-vars", default="", metavar="A=B,C=D",
                      help="only where A of the server equals B of the load")  # fmt: skip
    out = parser.add_argument_group("results")
    out.add_argument("-o", "--output-dir", type=Path, default=Path("results"), metavar="FOLDER")
    out.add_argument("-e", "--experiment-name", metavar="NAME", help="default: the time")
    out.add_argument("--num-runs", type=int, default=3, metavar="N")
    out.add_argument("--resume", action="store_true", help="do what the experiment lacks")
    out.add_argument("--dry-run", action="store_true", help="print the commands, and stop")


@dataclass(frozen=True)
class SweepFolder:
    """Where the results of a combination are: a file for each run, with a log beside it."""

    folder: Path

    def result(self, number: int) -> dict[str, Any] | None:
        """What a run has written; None if it has not, or not to the end."""
        try:
            figures = json.loads((self.folder / f"run-{number}.json").read_text())
        except (OSError, ValueError):
            return None
        return figures if isinstance(figures, dict) else None


def run(args: argparse.Namespace) -> int:
    """Sweep and report; 1 if a command or a request failed."""
    if args.num_runs < 1:
        raise InvalidParameter("--num-runs", args.num_runs, "it must be above 0")
    served = read_sets("--serve-params", args.serve_params, args.serve_param)
    sent = read_sets("--bench-params", args.bench_params, args.bench_param)
    plan = list(pairs_of(served, sent, parse_links(args.link_vars)))
    commands = Commands.of(args, served)
    if args.dry_run:
        _print_plan(commands, plan, args.num_runs)
        return 0
    folder = _folder(args)
    sweep = Sweep(args, commands, folder)
    with _ended_by_sigterm():
        for server, loads in plan:
            sweep.serve(server, loads)
    return sweep.report(plan)


class Sweep:
    """Runs what is missing in `folder`. `failures`: what went wrong, in words."""

    def __init__(self, args: argparse.Namespace, commands: Commands, folder: Path) -> None:
        self._args, self._commands, self._folder = args, commands, folder
        self.failures: list[str] = []

    def serve(self, server: ParameterSet, loads: Sequence[ParameterSet]) -> None:
        """One server and its loads; a failure is noted, and the sweep goes on."""
        missing = [(load, number) for load in loads for number in range(self._args.num_runs)
                   if self._place(server, load).result(number) is None]  # fmt: skip
        if not missing:
            return
        own = self._folder / self._commands.folder_of(server)
        own.mkdir(exist_ok=True)
        print(f"[{server.name}]", flush=True)
        try:
            with running_server(
                self._commands.server_words(server),
                self._commands.url,
                own / "server.log",
                ready_s=self._args.server_ready_timeout,
                shows=self._args.show_stdout,
            ):
                for load, number in missing:
                    self._measure(server, load, number)
        except CommandFailed as error:
            self._fail(server.name, error)

    def _measure(self, server: ParameterSet, load: ParameterSet, number: int) -> None:
        place = self._place(server, load)
        place.folder.mkdir(exist_ok=True)
        print(f"  [{load.name}] run {number + 1} of {self._args.num_runs}", flush=True)
        part = place.folder / f"run-{number}.part"
        words = [*self._commands.load_words(load, number), "--save-result"]
        words += ["--result-dir", str(place.folder), "--result-filename", part.name]
        log = place.folder / f"run-{number}.log"
        try:
            part.unlink(missing_ok=True)
            self._call(words, log)
            json.loads(part.read_text())
        except (CommandFailed, OSError, ValueError) as error:
            text = error if isinstance(error, CommandFailed) else f"no result; {last_lines(log)}"
            self._fail(f"{server.name}; {load.name}; run {number + 1}", text)
            return
        part.replace(place.folder / f"run-{number}.json")
        if self._commands.after:
            self._call(
                self._commands.after, place.folder / f"after-{number}.log", must_succeed=True
            )

    def _call(self, words: Sequence[str], log: Path, *, must_succeed: bool = False) -> None:
        """Run a command to its end. A load with failed requests ends with 1, and has a result."""
        with log.open("wb") as file:
            process = start(words, None if self._args.show_stdout else file)
            try:
                code = process.wait()
            finally:
                end(process)
        if code not in ((0,) if must_succeed else (0, 1)):
            raise CommandFailed(f"{shlex.join(words[:3])} ... ended with code {code}; "
                                f"{last_lines(log)}")  # fmt: skip

    def report(self, plan: Sequence[tuple[ParameterSet, list[ParameterSet]]]) -> int:
        """Write and print what there is; the exit code."""
        runs = [
            Run(server.name, load.name, number, figures)
            for server, loads in plan
            for load in loads
            for number in range(self._args.num_runs)
            if (figures := self._place(server, load).result(number)) is not None
        ]
        summary = write_report(runs, self._folder)
        print(table(summary))
        try:
            if summary:
                plot_summary(summary, self._folder / "summary.png")
        except ImportError:
            print("There is no picture: pip install 'quire[bench]'.")
        print(f"Results are in {self._folder}")
        for text in self.failures:
            print(f"FAILED: {text}")
        return 1 if self.failures or any(row.get("failed") for row in summary) else 0

    def _place(self, server: ParameterSet, load: ParameterSet) -> SweepFolder:
        own = self._commands.folder_of(server)
        return SweepFolder(self._folder / own / load.folder(self._commands.bench))

    def _fail(self, what: str, why: object) -> None:
        self.failures.append(f"{what}: {why}")
        print(f"  FAILED: {what}: {why}", file=sys.stderr)


def _print_plan(
    commands: Commands, plan: Sequence[tuple[ParameterSet, list[ParameterSet]]], num_runs: int
) -> None:
    for server, loads in plan:
        print(shlex.join(commands.server_words(server)))
        for load in loads:
            for number in range(num_runs):
                print("  " + shlex.join(commands.load_words(load, number)))


def _folder(args: argparse.Namespace) -> Path:
    if args.resume and args.experiment_name is None:
        raise InvalidParameter("--resume", True, "name the experiment with -e")
    name = args.experiment_name or time.strftime("%Y%m%d-%H%M%S")
    folder: Path = args.output_dir / name
    if folder.exists() and not args.resume:
        hint = "Go on with it by --resume, or name another."
        raise InvalidParameter("--experiment-name", name, f"{folder} exists", hint)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the sweep as Ctrl-C does, so that no server is left behind."""

    def stop(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
