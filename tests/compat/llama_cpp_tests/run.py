"""llama.cpp's own tests of the routes that are served, unmodified, against `quire serve`.

    python -m tests.compat.llama_cpp_tests.run FOLDER [FILE ...] [--resume]

fetches the source distribution of llama-cpp-python from the registry into FOLDER, makes stand-ins
for the models, runs the files of FILES (or FILE ...) and prints a table. Exits with 1 where a test
fails or is skipped for a reason that left_out.txt does not have. `--resume` goes on with a run.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.compat.chat_templates import ARCHIVE, DIGEST
from tests.compat.left_out import read_list
from tests.compat.source_distribution import fetch

HERE = Path(__file__).parent
FILES = (
    *("basic", "rerank", "tokenize", "chat_completion", "completion", "embedding", "security"),
    *("stream", "ignore_eos", "compat_anthropic", "compat_oai_responses", "infill", "template"),
    *("tool_call",),
)
"""Those of routes that are served; others are run by name."""


LEFT_OUT = list(read_list(HERE))


def reason_for(test, kind):
    """Why a test is left out, or fails by design; None for another. A line is for a file or a test
    with all its parameters.
    """
    base = test.partition("[")[0]
    names = (base, base.partition("::")[0])
    return next((why for each, what, why in LEFT_OUT if each == kind and what in names), None)


def table(outcomes):
    """The counts of each file, and (test, reason, message) of what failed or was skipped."""
    counts, told, last = {}, [], {}
    for outcome, test, why in outcomes:
        if last.get(test, ("", ""))[0] != "failed":
            last[test] = outcome, why
    for test, (outcome, why) in last.items():
        left_out = reason_for(test, "test")
        if left_out is not None or "NOT SERVED" in why:
            outcome = "left out"
        elif outcome != "passed":
            told.append((test, reason_for(test, "differs"), why))
            outcome = "failed" if outcome == "failed" else "left out"
        counts.setdefault(test.partition("::")[0], Counter())[outcome] += 1
    return counts, told


def show(counts):
    total = sum(counts.values(), Counter())
    print(f"{'file':36} {'passed':>7} {'failed':>7} {'left out':>9}")
    for name, found in [*sorted(counts.items()), ("all", total)]:
        print(f"{name:36} {found['passed']:7} {found['failed']:7} {found['left out']:9}")


def server_command(folder):
    """A file that starts the stand-in for llama-server."""
    path = folder / "llama-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "llama_server.py"}" "$@"\n')
    path.chmod(0o755)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", nargs="*", default=FILES)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    source = fetch(folder, "llama-cpp-python", ARCHIVE, DIGEST, "vendor/llama.cpp/")
    tests = source / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    if not (folder / "checkpoints").is_dir():
        maker = HERE.parent / "reference_tests" / "checkpoints.py"
        subprocess.run([sys.executable, maker, folder], check=True)
    outcomes = folder / "llama_cpp.tsv"
    if not given.resume:
        outcomes.write_text("")
    path = os.pathsep.join(filter(None, [str(HERE), str(tests), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {
        "PYTHONPATH": path, "LLAMA_SERVER_BIN_PATH": str(server_command(folder)),
        "STAND_INS": str(folder / "checkpoints"), "OUTCOMES": str(outcomes), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    for name in given.file:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "over_quire", "-p", "no:cacheprovider",
             "-W", "ignore", "--tb=short", f"unit/test_{name}.py"],
            cwd=tests, env=environ, check=False, stdout=sys.stderr,
        )  # fmt: skip
    lines = outcomes.read_text(encoding="utf-8").splitlines()
    counts, told = table([line.split("\t", 2) for line in lines])
    show(counts)
    for test, reason, why in told:
        print(f"{test}: {reason or why[:200]}")
    return int(any(reason is None for _, reason, _ in told))


if __name__ == "__main__":
    raise SystemExit(main())
