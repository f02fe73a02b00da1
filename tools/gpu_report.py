"""Check and measure this engine on an NVIDIA GPU, in one command.

    python tools/gpu_report.py [--wheels FOLDER] [--output gpu_report.json] [--minutes 8]
                               [--parts NAME ...]

Runs from a plain checkout without network: what of msgspec, pyzmq, starlette and the like is not
installed is taken from the wheels in FOLDER (`pip download --only-binary :all: -d FOLDER msgspec
pyzmq starlette uvicorn httptools llguidance`). The C++ extension is not needed.

Every part is a process of its own with a time limit, so that an illegal access in one kernel takes
one part with it: first those that check answers, several at once, then those that measure, one
after the other. Prints a table as the figures come, and keeps it as JSON in --output; what parts
log is in a file next to it. Parts that do not fit into the time are named, not left out.

Exit status: 0 measured and all bounds kept, 1 some bound missed or some part failed, 2 no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent  # of the checkout: the oracles are beside the tests
sys.path[:0] = [str(HERE), str(ROOT / "src"), str(ROOT)]

from gpu.parts import CHECKS, SPEEDS, Part, lines_of  # noqa: E402
from gpu.told import Line, Report  # noqa: E402

NEEDED = ("msgspec", "zmq", "tokenizers", "safetensors", "psutil", "tqdm", "jinja2")
"""What the engine imports beside torch and numpy, under its import name."""

FOR_SERVERS = ("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client")
WHEEL_NAMES = {"zmq": "pyzmq"}


def main(arguments: list[str] | None = None) -> int:
    """The report; the exit status."""
    args = parse(arguments)
    if args.one:
        return print_lines(args.one, args.until)
    reason = why_no_gpu()
    if reason:
        print(f"There is nothing to measure: {reason}.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        missing = add_wheels(args.wheels, Path(folder))
        if missing:
            print(f"Missing: {', '.join(missing)}. Give a folder of wheels with --wheels.")
            return 2
        return Run(args, Path(folder)).report()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is not installed")
    parser.add_argument("--output", type=Path, default=Path("gpu_report.json"))
    parser.add_argument("--minutes", type=float, default=8.0, help="parts end by then")
    parser.add_argument("--parts", nargs="+", help="only those whose names begin with these")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 2) - 2))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def print_lines(name: str, until: float) -> int:
    """Print the lines of one part, each as JSON; `until` is a time.time()."""
    for line in lines_of(name, until - time.time() + time.monotonic()):
        print(line.as_json(), flush=True)
    return 0


def why_no_gpu() -> str:
    """Why there is no GPU to use; empty if there is one."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is not built for NVIDIA GPUs"
    return "" if torch.cuda.is_available() else "torch finds no NVIDIA GPU on this machine"


def add_wheels(wheels: Path | None, target: Path) -> list[str]:
    """Make what is needed importable; the names that still are not."""
    wanted = (*NEEDED, *FOR_SERVERS, "llguidance")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing and wheels is not None:
        names = [WHEEL_NAMES.get(name, name) for name in missing]
        options = ["--no-index", "--no-deps", "--find-links", str(wheels), "--target", str(target)]
        for name in names:  # one by one: a wheel that is not there stops no other
            command = [sys.executable, "-m", "pip", "install", "--quiet", *options, name]
            subprocess.run(command, check=False)
        sys.path.append(str(target))
        importlib.invalidate_caches()
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


class Run:
    """Runs the parts and collects their lines."""

    def __init__(self, args: argparse.Namespace, wheels: Path) -> None:
        import torch

        self._start = time.time()
        self._until = self._start + 60 * args.minutes
        self._wanted: list[str] = args.parts or [""]
        self._output: Path = args.output
        self._jobs: int = args.jobs
        self._lock = threading.Lock()
        self._log = open(args.output.with_suffix(".log"), "w")  # noqa: SIM115 (to the end)
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(wheels)]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        self._report = Report(facts)

    def report(self) -> int:
        """Run everything; the exit status."""
        with ThreadPoolExecutor(self._jobs) as pool:
            list(pool.map(self._run, [part for part in CHECKS if self._is_wanted(part)]))
        for part in SPEEDS:
            if self._is_wanted(part):
                self._run(part)
        self._add(Line("this report", time.time() - self._start, "s"))
        self._log.close()
        lines = self._report.lines
        return int(any(line.verdict in ("MISSED", "not measured") for line in lines))

    def _is_wanted(self, part: Part) -> bool:
        return any(part.name.startswith(name) for name in self._wanted)

    def _run(self, part: Part) -> None:
        """Run one part in a process group of its own, which is gone afterwards."""
        begin = time.time()
        limit = min(part.limit_s, self._until - begin)
        if limit < part.least_s:
            self._add(Line(part.name, None, note=f"the time was over: --parts {part.name}"))
            return
        command = [sys.executable, str(Path(__file__).resolve()), "--one", part.name]
        command += ["--until", str(begin + limit)]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment,
                start_new_session=True,
            )  # fmt: skip
            timer = threading.Timer(limit + part.grace_s, _kill, [process])
            timer.start()
            assert process.stdout is not None
            for text in process.stdout:
                self._add_text(text, log)
            code = process.wait()
            process.stdout.close()
            timer.cancel()
            _kill(process)  # what it has started
            self._conclude(part, code, time.time() - begin, log)

    def _add_text(self, text: str, log: Any) -> None:
        try:
            self._add(Line.from_json(text))
        except ValueError:  # printed by something that the part uses
            log.write(text)

    def _conclude(self, part: Part, code: int, seconds: float, log: Any) -> None:
        """Keep the log, and say how the part ended if it failed."""
        log.flush()
        log.seek(0)
        text = log.read()
        with self._lock:
            self._log.write(f"==== {part.name}: exit status {code}, {seconds:.1f} s\n{text}\n")
            self._log.flush()
        if code:
            tail = [line for line in text.strip().splitlines() if line.strip()][-1:]
            note = f"exit status {code} after {seconds:.0f} s: {' '.join(tail)[:300]}"
            self._add(Line(part.name, None, note=note))

    def _add(self, line: Line) -> None:
        with self._lock:
            self._report.add(line)
            self._report.write(self._output)


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
