"""The whole comparison in pieces of some minutes, so that it can be run in pauses; what was
measured is added to the files of one folder, and printed as tables.

    python benchmarks/peers/whole_table.py --list
    python benchmarks/peers/whole_table.py --vllm ENV/bin/python --llama-cpp ENV/bin/python PIECE
    python benchmarks/peers/whole_table.py --tables

Pieces are `write/MODEL` (checkpoints, which other pieces would write), `MODEL/ENGINE:KIND/GROUP`
(workloads of compare.py), `start/MODEL` (process to first token: `import torch` alone, a first
start, a second one that maps packed weights, llama.cpp), `stall/MODEL/MS` (gaps beside a long
prompt, and the same work; `stall/4b-int4/long` gaps alone, beside 8,000 tokens) and
`serve/ENGINE/CLIENTS` (prompts of 32 to 2,048 tokens; the load generator is vLLM's). A piece that
was run again counts with all its times. --prefix is a command that keeps the machine quiet.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from quire.bench.workload import random_model
from quire.hardware.host import gather_machine_facts

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIGURES = ("output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "p99_ttft_ms")
"""Of a server, as vLLM's load generator names them."""
GROUPS = {
    "short": ("1x1+65*3", "1x512+1*3", "1x2048+1*2"),
    "4k": ("1x4096+33",),
    "8k": ("1x8192+17",),
    "16k": ("1x16384+17",),
    "batches": ("8x128+64", "32x128+64"),
}
KINDS = {
    "quire": ("bfloat16", "int8", "int4"),
    "vllm": ("bfloat16",),
    "llama_cpp": ("bf16", "q8_0", "q4_0"),
}
_ENGINES = [f"{engine}:{kind}" for engine, kinds in KINDS.items() for kind in kinds]
PIECES = [
    *(f"write/{model}" for model in ("0.6b", "4b", "2b-experts")),
    *(f"0.6b/{engine}/{group}" for engine, group in product(_ENGINES, GROUPS)),
    *(f"2b-experts/{e}/{g}" for e, g in product(_ENGINES, ("short", "batches")) if "vllm" not in e),
    *(f"start/{model}" for model in ("0.6b", "4b", "2b-experts")),
    *(f"stall/{model}/{goal}" for model, goal in product(("0.6b", "4b-int4"), (0, 250))),
    "stall/4b-int4/long",
    *(f"serve/{engine}/{clients}" for clients, engine in product((8, 32), ("quire", "vllm"))),
]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE")
    parser.add_argument("--list", action="store_true", help="print the pieces, done ones marked")
    parser.add_argument("--tables", action="store_true", help="print what there is")
    for engine in ("vllm", "llama-cpp"):
        parser.add_argument(f"--{engine}", help="interpreter of its environment")
    parser.add_argument("--vllm-preload", default="", help="vLLM's LD_PRELOAD")
    parser.add_argument("--starts", type=int, default=3, help="of each engine in a start piece")
    parser.add_argument("--prefix", default="", help="command to put before what is measured")
    parser.add_argument("--output", type=Path, default=Path("whole_table"), help="a folder")
    return parser.parse_args()


def main() -> int:
    """Run the pieces, one after the other."""
    args = parse()
    args.output = args.output.absolute()
    args.output.mkdir(exist_ok=True)
    unknown = set(args.pieces) - set(PIECES)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not among the pieces that --list prints")
    done = _read(args.output / "done.json")
    if args.list:
        for piece in PIECES:
            print("done" if piece in done else "    ", piece)
    for piece in args.pieces:
        print(piece, "...", file=sys.stderr, flush=True)
        began = time.time()
        run(piece, args)
        done.setdefault(piece, []).append([time.strftime("%F %T"), round(time.time() - began)])
        (args.output / "done.json").write_text(json.dumps(done, indent=1) + "\n")
    if args.tables:
        print_tables(args.output)
    return 0


def run(piece: str, args: argparse.Namespace) -> None:
    """Measure one piece, and add what was found to its file."""
    first, *rest = piece.split("/")
    match first:
        case "write":
            random_model(rest[0])
        case "start":
            run_starts(rest[0], args)
        case "stall":
            run_stall(rest[0], rest[1], args)
        case "serve":
            run_serve(rest[0], rest[1], args)
        case _:
            run_compare(first, rest[0], rest[1], args)


_TORCH = "import time, torch; print(time.monotonic())"


def run_compare(model: str, engine: str, group: str, args: argparse.Namespace) -> None:
    """A group of workloads on one engine."""
    prefix = args.prefix
    if engine.startswith("vllm") and args.vllm_preload:
        prefix = f"{prefix} env LD_PRELOAD={args.vllm_preload}"
    words = ["--prefix", prefix, "--kinds", engine, "--workloads", *GROUPS[group], "--add"]
    words += ["--random-model", model, "--output", str(args.output / model.replace(".", "_"))]
    _call([sys.executable, str(HERE / "compare.py"), *_peers(args), *words])


def run_starts(model: str, args: argparse.Namespace) -> None:
    """Process to first token, each kind several times in a row: a virtual machine's host takes
    back memory that nobody uses, and is slow to give it again.
    """
    folder = random_model(model)
    request = {
        "model": str(folder),
        "num_threads": gather_machine_facts().num_cores,
        "cache": str(folder.parent / "peers"),
        "max_prompts": 1,
        "max_len": 4096,
        "workloads": {},
    }
    engine = str(HERE / "first_token.py")
    kinds: list[tuple[str, list[str], dict[str, Any] | None]] = [
        ("import torch", [sys.executable, "-c", _TORCH], None),
        ("quire, first start", [sys.executable, engine, "run_quire"], {"packed_weights_gib": 0}),
        ("quire, second start", [sys.executable, engine, "run_quire"], {}),
    ]
    if args.llama_cpp:
        kinds.append(("llama.cpp", [args.llama_cpp, engine, "run_llama_cpp"], None))
    found = _read(args.output / "starts.json")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "request.json")
        for (name, words, more), turn in product(kinds, range(args.starts + 1)):
            kind = "bfloat16" if more is not None else "bf16"
            file.write_text(json.dumps(request | {"kind": kind, "engine_args": more or {}}))
            began = time.monotonic()
            answer = subprocess.run(
                [*shlex.split(args.prefix), *words, str(file)],
                text=True,
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
            if turn:  # one before fills the page cache, has the host give memory, packs weights
                took = float(answer.split()[-1]) - began
                found.setdefault(model, {}).setdefault(name, []).append(round(took, 3))
    (args.output / "starts.json").write_text(json.dumps(found, indent=1) + "\n")


def run_stall(model: str, goal: str, args: argparse.Namespace) -> None:
    """Gaps of streams beside a long prompt, with one latency goal."""
    shape, _, quantization = model.partition("-")
    is_long = goal == "long"
    words = ["--random-model", shape, "--stalls", "250" if is_long else goal, "--prompts", "1"]
    if is_long:
        words += ["--prompt-len", "8000", "--learning-len", "300", "--stream-len", "0"]
    elif shape == "0.6b":
        words += ["--prompt-len", "8000", "--learning-len", "3000"]
    else:
        words += ["--prompt-len", "2000", "--learning-len", "1000", "--stream-len", "120"]
    if quantization:
        words += ["--quantization", quantization]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "stall.json")
        words += ["--output-json", str(file)]
        script = str(ROOT / "benchmarks/long_prompt.py")
        _call([*shlex.split(args.prefix), sys.executable, script, *words])
        rows = json.loads(file.read_text())["rows"]
    found = _read(args.output / "stalls.json")
    found.setdefault(f"{model}, {goal} ms", []).extend(rows)
    (args.output / "stalls.json").write_text(json.dumps(found, indent=1) + "\n")


def run_serve(engine: str, clients: str, args: argparse.Namespace) -> None:
    """Mixed lengths on one server."""
    if not args.vllm:
        sys.exit("The load generator is vLLM's: give --vllm.")
    words = [sys.executable, "-m", "benchmarks.peers.serve_compare", "--only", engine]
    words += ["--vllm", str(Path(args.vllm).absolute().parents[1])]
    words += ["--vllm-preload", args.vllm_preload, "--concurrency", clients]
    words += ["--random-model", "0.6b", "--dtype", "bfloat16", "--backends", "openai"]
    words += ["--input-len", "1040", "--range-ratio", "0.97"]
    words += ["--output-len", "64", "--max-model-len", "4096", "--rounds", "1"]
    for gate in ("--start-gate", "--load-gate") if args.prefix else ():
        words += [gate, args.prefix]
    with tempfile.TemporaryDirectory() as scratch:
        _call([*words, "--output", f"{scratch}/serve"])
        runs = _read(Path(scratch, "serve.json"))["runs"]
    found = _read(args.output / "serve.json")
    found.setdefault("runs", []).extend(runs)
    (args.output / "serve.json").write_text(json.dumps(found, indent=1) + "\n")


def print_tables(folder: Path) -> None:
    """All that was measured, as Markdown."""
    facts = gather_machine_facts()
    print(f"{facts.cpu_name}, {facts.num_cores} cores\n")
    for file in sorted(folder.glob("*.md")):
        print(f"## {file.stem}\n\n{file.read_text()}")
    for model, kinds in _read(folder / "starts.json").items():
        print(f"## start to first token, {model}: median (all), s\n")
        for name, times in kinds.items():
            print(f"- {name}: {statistics.median(times):.2f} ({', '.join(map(str, times))})")
        print()
    for name, rows in _read(folder / "stalls.json").items():
        print(f"## stall, {name}\n")
        for row in rows:
            print("- " + ", ".join(f"{key} {value:.1f}" for key, value in row.items()))
        print()
    if served := _read(folder / "serve.json"):
        print("## server, mixed lengths\n")
        keys = ("engine", "concurrency", "failed", *FIGURES)
        print(f"| {' | '.join(keys)} |", "| --- " * len(keys) + "|", sep="\n")
        for row in served["runs"]:
            print("| " + " | ".join(str(row.get(key, "")) for key in keys) + " |")


def _peers(args: argparse.Namespace) -> list[str]:
    found = ["--vllm", args.vllm] if args.vllm else []
    return found + (["--llama-cpp", args.llama_cpp] if args.llama_cpp else [])


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _call(words: list[str]) -> None:
    subprocess.run(words, check=True, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
