"""vLLM's own tests of its public behaviour, unmodified, through quire.as_vllm.

    python -m tests.compat.reference_tests.run FOLDER [PART ...] [--with PATHS] [--seconds S]

fetches the source distribution of vLLM from the registry into FOLDER, makes stand-ins for the
models that its tests name, runs each file of PART (by default all of PARTS, else files or folders
below `tests`) in a process of its own and prints a table. PATHS has pytest-asyncio, pytest-timeout,
tblib, pybase64 and partial-json-parser where the environment lacks them. Exits with 1 where a test
fails or is skipped for a reason that left_out.txt does not have, and with 2 where the run stopped
after S seconds: the same command goes on with it, at the test where it was. A run belongs to the
commit in FOLDER/commit.txt; at another one, a new one begins.
"""

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

from quire.as_vllm.table import VERSION
from quire.as_vllm.variables import name_for_children
from tests.compat.left_out import read_list
from tests.compat.source_distribution import fetch

HERE = Path(__file__).parent
DIGEST = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
PARTS = (
    *("entrypoints", "tool_parsers", "reasoning", "v1/engine", "v1/sample", "samplers", "lora"),
    "test_*",
)


# the list


LEFT_OUT = list(read_list(HERE))


def reason_for_file(path):
    """Why a file is not run; None for one that is."""
    return next(
        (why for kind, what, why in LEFT_OUT if kind == "file" and path.startswith(what)), None
    )


def reason_for_test(test, wanted="test"):
    """Why what becomes of a test that ran says nothing, or with `differs` why it fails by design;
    None for another one.
    """
    return next(
        (why for kind, what, why in LEFT_OUT if kind == wanted and test.startswith(what)), None
    )


def reason_for_skip(text):
    """Why a skipped test is left out; None where the list does not have it. `name` is the beginning
    of a name of vLLM that the test used, `skip` a part of the test's own words.
    """
    _, found, name = text.rpartition("PHANTOM ")
    if found:
        fits = [
            (len(what), why) for kind, what, why in LEFT_OUT
            if kind == "name" and f"{name.split()[0]}.".startswith(f"{what}.")
        ]  # fmt: skip
        return max(fits, default=(0, None))[1]
    return next((why for kind, what, why in LEFT_OUT if kind == "skip" and what in text), None)


# preparation


def environment(folder, source, more):
    """The variables of the process that runs tests. The tests and the plugin come from its path:
    `tests` is vLLM's there.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), str(source), more, os.environ.get("PYTHONPATH")])
    )
    name_for_children()
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "hub"),
        "TOKENIZERS_PARALLELISM": "false",
        "REFERENCE_SOURCE": str(source),
        "REFERENCE_CHECKPOINTS": str(folder / "checkpoints"),
        "REFERENCE_OUTCOMES": str(folder / "outcomes.tsv"),
        "REFERENCE_LOG": str(folder / "log.txt"),
    }


def files_of(source, parts):
    """The files of tests, each with its part."""
    root = source / "tests"
    for part in parts:
        for found in sorted(root.glob(part)):
            inside = sorted(found.rglob("test_*.py")) if found.is_dir() else [found]
            for path in inside:
                yield part, str(path.relative_to(source))


# the table


def table(outcomes, part_of):
    """The counts of each part, what was skipped for a reason not listed, and what failed, with the
    listed reason where there is one.
    """
    counts, unlisted, failed = defaultdict(Counter), [], []
    last = {}
    for outcome, test, why in outcomes:
        if last.get(test, ("", ""))[0] != "failed":  # a test that fails may fail at its end, too
            last[test] = outcome, why
    for test, (outcome, why) in last.items():
        part = part_of.get(test.partition("::")[0], "?")
        if reason_for_test(test) is not None:
            outcome = "left out"
        elif "[XPASS(strict)]" in why:
            outcome = "passed"  # what vLLM's own parser is known to fail
        elif outcome == "skipped":
            if reason_for_skip(why) is None:
                unlisted.append((test, why))
            outcome = "left out"
        if outcome == "failed":
            failed.append((test, reason_for_test(test, "differs"), why))
        counts[part][outcome] += 1
    return counts, unlisted, failed


def show(counts, num_files):
    total = sum(counts.values(), Counter())
    print(f"{'part':14} {'passed':>7} {'failed':>7} {'share':>7} {'left out':>9} {'files':>6}")
    for part, found in [*counts.items(), ("all", total)]:
        ran = found["passed"] + found["failed"]
        share = f"{100 * found['passed'] / ran:.1f} %" if ran else ""
        of = num_files.get(part, sum(num_files.values()))
        print(
            f"{part:14} {found['passed']:7} {found['failed']:7} {share:>7} {found['left out']:9} "
            f"{of:6}"
        )


# the run


class Run:
    """The files of one run: those that have ended are lines of done.txt, so that it can go on."""

    def __init__(self, folder):
        self.outcomes, self.done = folder / "outcomes.tsv", folder / "done.txt"
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=HERE, capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
        mark = folder / "commit.txt"
        if not mark.exists() or mark.read_text() != commit:
            self.outcomes.write_text("")
            self.done.write_text("")
            mark.write_text(commit)

    def go_on(self, asked, source, variables, *, until, num_workers):
        """Run the files that have not ended; whether all have, before it is `until`."""
        ended = set(self.done.read_text().split())
        left = queue.SimpleQueue()
        for path in asked:
            if path not in ended:
                left.put(path)
        workers = [
            subprocess.Popen(
                [sys.executable, HERE / "forks.py"], cwd=source, text=True, env=variables,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for _ in range(min(num_workers, left.qsize()))
        ]  # fmt: skip
        threads = [threading.Thread(target=self._feed, args=(each, left)) for each in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        is_complete = not any(thread.is_alive() for thread in threads)
        for worker in workers:
            worker.terminate()
            worker.wait()
        return is_complete and left.empty()

    def _feed(self, worker, left):
        while not left.empty():
            try:
                path = left.get_nowait()
                print(path, file=worker.stdin, flush=True)
            except (queue.Empty, BrokenPipeError):
                return
            if not worker.stdout.readline():
                return
            with self.done.open("a") as file:
                file.write(f"{path}\n")
            print(f"{path} ({left.qsize()} left)", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--with", dest="more", default="")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("part", nargs="*", default=PARTS)
    given = parser.parse_args()
    until = None if given.seconds is None else time.monotonic() + given.seconds
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    source = fetch(folder, "vllm", f"vllm-{VERSION}.tar.gz", DIGEST)
    if not (folder / "hub").is_dir():
        subprocess.run([sys.executable, HERE / "checkpoints.py", folder], check=True)
    part_of, num_files, asked = {}, Counter(), []
    for part, path in files_of(source, given.part):
        if path not in part_of:
            part_of[path] = part
            num_files[part] += 1
            if reason_for_file(path) is None:
                asked.append(path)
    run = Run(folder)
    variables = environment(folder, source, given.more)
    is_whole = run.go_on(asked, source, variables, until=until, num_workers=given.workers)
    outcomes = run.outcomes
    lines = outcomes.read_text(encoding="utf-8").splitlines()
    counts, unlisted, failed = table([line.split("\t", 2) for line in lines], part_of)
    show(counts, num_files)
    for test, reason, why in sorted(failed, key=lambda each: each[1] is None):
        print(f"failed: {test}: {reason or why[:200]}")
    for test, why in unlisted:
        print(f"skipped for a reason that left_out.txt does not have: {test}: {why[:200]}")
    if not is_whole:
        return 2
    return int(bool(unlisted) or any(reason is None for _, reason, _ in failed))


if __name__ == "__main__":
    raise SystemExit(main())
