"""Measure this engine on an NVIDIA GPU, in one command and within ten minutes.

    python tools/gpu_report.py [--wheels FOLDER] [--output gpu_report.json] [--minutes 8]

Runs from a plain checkout without network: what of msgspec, pyzmq, tokenizers and the like is not
installed is taken from the wheels in FOLDER (`pip download --only-binary :all: -d FOLDER msgspec
pyzmq tokenizers safetensors psutil tqdm huggingface_hub prometheus_client`). The C++ extension is
not needed. Prints a table and writes the same as JSON. Parts that do not fit into the time are
named, not left out.

Exit status: 0 measured and all bounds kept, 1 some bound missed or some part failed, 2 no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEEDED = ("msgspec", "zmq", "tokenizers", "safetensors", "psutil", "tqdm", "jinja2")
"""What the engine imports beside torch and numpy, under its import name."""

WHEEL_NAMES = {"zmq": "pyzmq"}
PARTS = (
    "kernels", "conformance", "large", "eight", "small", "host", "parity", "peer", "products",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The report; the exit status."""
    args = parse(arguments)
    root = HERE.parent  # of the checkout: the oracles are beside the tests
    sys.path[:0] = [str(HERE), str(root / "src"), str(root)]
    reason = why_no_gpu()
    if reason:
        print(f"There is nothing to measure: {reason}.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        missing = add_wheels(args.wheels, Path(folder))
        if missing:
            print(f"Missing: {', '.join(missing)}. Give a folder of wheels with --wheels.")
            return 2
        return report(args)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is not installed")
    parser.add_argument("--output", type=Path, default=Path("gpu_report.json"))
    parser.add_argument("--minutes", type=float, default=8.0, help="parts that start later do not")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    return parser.parse_args(arguments)


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
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and wheels is not None:
        names = [WHEEL_NAMES.get(name, name) for name in missing]
        options = ["--no-index", "--no-deps", "--find-links", str(wheels), "--target", str(target)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *names]
        subprocess.run(command, check=False)
        sys.path.append(str(target))
        importlib.invalidate_caches()
    return [name for name in missing if importlib.util.find_spec(name) is None]


def report(args: argparse.Namespace) -> int:
    """Run the parts one after the other; each line is printed as it comes."""
    import torch
    from gpu import ceilings, told

    start = time.monotonic()
    until = start + 60 * args.minutes - 30
    limits = ceilings.measure()
    result = told.Report({"device": torch.cuda.get_device_name(), "torch": torch.__version__})
    result.add(told.Line("copy bandwidth", limits.bytes_per_s / 1e9, "GB/s"))
    result.add(told.Line("bf16 product", limits.flops_per_s / 1e12, "TFLOP/s"))
    for name in args.parts:
        for line in lines_of(name, limits, until):
            result.add(line)
        result.write(args.output)
    result.add(told.Line("this report", time.monotonic() - start, "s", 600, is_least=False))
    result.write(args.output)
    return int(any(line.verdict in ("MISSED", "not measured") for line in result.lines))


def lines_of(name: str, limits: object, until: float) -> Iterator[object]:
    """The lines of one part; where it fails or the time is over, one that says so."""
    from gpu import told

    if time.monotonic() > until:
        yield told.Line(name, None, note=f"the time was over: --parts {name} measures it")
        return
    try:
        yield from part(name, limits, until)()
    except Exception as error:
        yield told.Line(name, None, note=f"{type(error).__name__}: {error}")


def part(name: str, limits: object, until: float) -> Callable[[], Iterator[object]]:
    """What measures the part; imported only now, as the wheels may have come just before."""
    if name == "kernels":
        from gpu import kernels

        return lambda: kernels.table(limits)
    if name == "products":
        from gpu import products

        return lambda: products.table(limits, until)
    if name in ("conformance", "parity"):
        from gpu import correctness

        share = min(until, time.monotonic() + 150)
        return lambda: getattr(correctness, name)(share)
    from gpu import engines

    parts = {
        "large": lambda: engines.large(limits),
        "eight": lambda: engines.eight_bits(limits),
        "small": lambda: engines.small(limits),
        "host": engines.host,
        "peer": lambda: engines.peer(until),
    }
    return parts[name]


if __name__ == "__main__":
    sys.exit(main())
