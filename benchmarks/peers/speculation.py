"""n-gram drafts of Quire, vLLM and llama.cpp: the same random weights and repetitive prompts, one
request at a time, greedily, with and without drafts.

    python benchmarks/peers/speculation.py --vllm ENV/bin/python --llama-lookup ENV/bin/python

Run it with Quire's interpreter; compare.py says what is in the environments. Each engine is a
process of its own with drafts and another without. All look the last four tokens up, then three,
two and one, in the prompt and in what came after it. A random model soon says the same few tokens
again and again, so that drafts are right often.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from compare import HERE, run, seconds
from tokenizers import Tokenizer

from quire.bench.workload import random_model
from quire.hardware.host import gather_machine_facts

KINDS = {"quire": "bfloat16", "vllm": "bfloat16", "llama_lookup": "bf16"}
SENTENCES = (
    "for name in names:\n    print(name, table[name])\n",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. ",
    '{"id": 17, "name": "seventeen", "tags": ["odd", "prime"]},\n',
    "if left < right:\n    left, right = right, left\n",
)
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quire", default=sys.executable, help="interpreter; default: this one")
    for engine in ("vllm", "llama-lookup"):
        parser.add_argument(f"--{engine}", help="interpreter; without one it is left out")
    parser.add_argument("--num-tokens", type=int, default=3, help="drafts in a step")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900, help="seconds for one process")
    parser.add_argument("--prefix", default="", help="command to put before each engine's")
    parser.add_argument("--vllm-kind", default=KINDS["vllm"], help="the type of vLLM's weights")
    return parser.parse_args()


def main() -> None:
    """Run everything and print a row of the table after each engine."""
    args = parse()
    num_threads = gather_machine_facts().num_cores
    print(
        "| engine | tokens/s without | with | gain | the same output | the output of Quire |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    ours: list[list[int]] = []
    for engine, kind in (KINDS | {"vllm": args.vllm_kind}).items():
        if getattr(args, engine):
            plain, drafted = (ask(args, engine, kind, num_threads, use) for use in (False, True))
            ours = ours or outputs(plain)
            print(f"| {engine} {kind} | {row(plain, drafted, ours)} |", flush=True)


def row(plain: dict[str, Any], drafted: dict[str, Any], ours: list[list[int]]) -> str:
    """What the table says about an engine, or why there is nothing."""
    reasons = [each["reason"] for each in (plain, drafted) if "reason" in each]
    if reasons:
        return "; ".join(reasons)
    before, after = rate(plain), rate(drafted)
    return (
        f"{before:.1f} | {after:.1f} | {after / before:.2f} | "
        f"{same(outputs(plain), outputs(drafted))} | {same(ours, outputs(plain))}"
    )


def ask(
    args: argparse.Namespace, engine: str, kind: str, num_threads: int, drafts: bool
) -> dict[str, Any]:
    """The answer of one process, or {"reason": why it gave none}."""
    folder = random_model("0.6b")
    request = {
        "model": str(folder),
        "kind": kind,
        "num_threads": num_threads,
        "cache": str(folder.parent / "peers"),
        "max_prompts": 1,
        "max_len": args.input_len + args.output_len + 2,
        "workloads": workloads(args, folder),
        "speculative_config": {**LOOKUP, "num_speculative_tokens": args.num_tokens}
        if drafts
        else None,
    }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "answer.json")
        Path(scratch, "request.json").write_text(json.dumps(request | {"answer": str(file)}))
        words = [*args.prefix.split(), getattr(args, engine), str(HERE / f"run_{engine}.py")]
        reason = run([*words, f"{scratch}/request.json"], num_threads, args.limit)
        return {"reason": reason} if reason else json.loads(file.read_text())


def workloads(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """For each sentence, again and again, one token after it, and all of them."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {}
    for i, sentence in enumerate(SENTENCES):
        ids = tokenizer.encode(sentence, add_special_tokens=False).ids * args.input_len
        for length in (1, args.output_len):
            found[f"{i}+{length}"] = {
                "prompts": [ids[: args.input_len]],
                "output_len": length,
                "repeats": args.repeats,
            }
    return found


def outputs(answer: dict[str, Any]) -> list[list[int]]:
    """The longer output of each prompt."""
    works = answer.get("workloads", {})
    return [work["outputs"][0] for name, work in works.items() if not name.endswith("+1")]


def rate(answer: dict[str, Any]) -> float:
    """Tokens per second after the first ones."""
    works = answer["workloads"]
    tokens = sum(len(ids) - 1 for ids in outputs(answer))
    elapsed = {name: seconds(works, name) for name in works}
    return tokens / sum(t * (-1 if name.endswith("+1") else 1) for name, t in elapsed.items())


def same(some: list[list[int]], others: list[list[int]]) -> str:
    """How many outputs agree."""
    return f"{sum(a == b for a, b in zip(some, others, strict=True))} of {len(some)}"


if __name__ == "__main__":
    main()
