"""All loops of trainers, one after the other: python -m tests.trainers.loops [WORD ...].

Each is a program of this folder or of benchmarks/trainers, in a process of its own that is killed
after `LONGEST_S`; with words, those whose names have one of them. Loops whose package is not
installed are left out, by name. Needs trl and aiohttp, and what installed_modules.py names. Prints
a table in Markdown, with the last line of each program as JSON below; the exit code is 1 where one
has failed, which is also the case where the engine's answers are not those of a start with the
trainer's weights, to the bit, or too far from those of transformers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LONGEST_S = 420
SCENES = ("openrlhf", "verl", "skyrl", "prime-rl", "nemo-rl", "open-instruct", "vllm-examples")


class Loop(NamedTuple):
    """A loop, the package that it needs, and its program."""

    name: str
    package: str
    program: list[str]


def script(name: str, file: str, *args: str) -> Loop:
    folder = ROOT / "benchmarks/trainers"
    return Loop(f"TRL, {name}", "trl", [sys.executable, str(folder / file), *args])


def module(name: str, package: str, file: str, scene: str) -> Loop:
    return Loop(name, package, [sys.executable, "-m", f"tests.trainers.{file}", scene])


LOOPS = [
    script("external_launcher", "trl_colocated.py"),
    script("external_launcher with sleep", "trl_colocated.py", "sleep"),
    script("vllm-serve", "trl_server.py"),
    script("AsyncGRPOTrainer", "trl_async.py"),
    *(module(f"{name}, as installed", name, "installed_modules", name) for name in SCENES[:2]),
    *(module(f"{name}, its calls", "quire", "framework_calls", name) for name in SCENES),
]


def played(loop: Loop) -> dict[str, Any]:
    """Run a loop's program: its last line, seconds and exit code."""
    began = time.perf_counter()
    process = subprocess.Popen(
        loop.program, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"rc": f"killed after {LONGEST_S} s", "s": LONGEST_S}
    lines = [line for line in output.splitlines() if line.startswith('{"')]
    last = json.loads(lines[-1]) if lines else {}
    [found] = last.values() if len(last) == 1 else [last]
    return {"rc": process.returncode, **found, "s": round(time.perf_counter() - began, 1)}


def row(name: str, found: dict[str, Any]) -> str:
    steps = found.get("steps", found.get("compared", ""))
    most = found.get("difference", found.get("largest difference from transformers", ""))
    most = f"{most:.1e}" if isinstance(most, float) else most
    result = "yes" if found["rc"] == 0 else f"FAILED ({found['rc']})"
    return f"| {name} | {steps} | {found['s']} | {result} | {most} |"


def main(words: list[str]) -> int:
    """Play them, and print the table."""
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"
    results = {}
    for loop in LOOPS:
        if words and not any(word in loop.name for word in words):
            continue
        if find_spec(loop.package) is None:
            print(f"{loop.name}: {loop.package} is not installed", flush=True)
            continue
        results[loop.name] = played(loop)
        print(row(loop.name, results[loop.name]), flush=True)
    print("\n| loop | steps or answers | s | bits of a start | from transformers |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in results.items():
        print(row(name, found))
    print(json.dumps(results))
    return int(any(found["rc"] != 0 for found in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
