"""How long texts take to become vectors: one, 32 and 512 short ones and 32 long ones, beside
sentence-transformers and the machine's arithmetic in the same run.

The trials take turns, and the best of each counts. A peer runs in a process of its own, with the
Python that is named, which has sentence-transformers; it sorts by length and pads.

    PYTHONPATH=src python benchmarks/embeddings.py --model MODEL --peer-python PYTHON
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from quire import LLM
from quire.bench.machine_limits import LimitProbe
from quire.bench.report import add_output_flag, finish
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.costs import flops_per_token
from quire.models.loading.source import locate

SENTENCE = "The quick brown fox jumps over the lazy dog and runs on until the night falls, says {}."
LONG = 10
"""Sentences of a long text."""

PEER = """
import json, sys, time, torch
from sentence_transformers import SentenceTransformer
model, dtype, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
options = {"dtype": getattr(torch, dtype)}
model = SentenceTransformer(model, device="cpu", model_kwargs=options)
print("ready", flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    start = time.perf_counter()
    model.encode(texts, batch_size=32, show_progress_bar=False, normalize_embeddings=True)
    print(time.perf_counter() - start, flush=True)
"""


class Peer:
    """sentence-transformers in a process of its own."""

    def __init__(self, python: str, model: str, dtype: str, num_threads: int) -> None:
        command = [python, "-c", PEER, model, dtype, str(num_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def seconds(self, texts: list[str]) -> float:
        """How long it takes for these texts."""
        assert self._process.stdin is not None
        print(json.dumps(texts), file=self._process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("sentence-transformers has ended")
        return line

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def workloads() -> dict[str, list[str]]:
    """Texts by name."""
    short = [SENTENCE.format(i) for i in range(512)]
    long = [" ".join(SENTENCE.format(i + j) for j in range(LONG)) for i in range(32)]
    return {"1 short": short[:1], "32 short": short[:32], "512 short": short, "32 long": long}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Best seconds of each workload, of us and of the peer, and what the arithmetic takes."""
    llm = LLM(args.model, dtype=args.dtype, cpu_threads=args.threads)
    probe = LimitProbe(args.dtype, args.threads)
    spec = read_spec(read_config(locate(args.model)))
    peer = None
    if args.peer_python is not None:
        peer = Peer(args.peer_python, args.model, args.dtype, args.threads)
    found = {}
    for name, texts in workloads().items():
        ours, theirs, limits = [], [], []
        for _ in range(args.trials):
            limits.append(probe.measure().flops_per_s)
            start = time.perf_counter()
            outputs = llm.embed(texts, use_tqdm=False)
            ours.append(time.perf_counter() - start)
            if peer is not None:
                theirs.append(peer.seconds(texts))
        lengths = [len(output.prompt_token_ids) for output in outputs]
        flops = sum(length * flops_per_token(spec, length) for length in lengths)
        found[name] = {
            "tokens": sum(lengths),
            "s": min(ours),
            "share_of_arithmetic": flops / max(limits) / min(ours),
            **({"peer_s": min(theirs), "times_as_fast": min(theirs) / min(ours)} if peer else {}),
        }
    if peer is not None:
        peer.close()
    return found


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder or a hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--peer-python", help="a Python with sentence-transformers")
    add_output_flag(parser)
    args = parser.parse_args()
    found = measure(args)
    for name, row in found.items():
        line = f"{name:10} {row['tokens']:6} tokens {row['s'] * 1e3:8.1f} ms"
        line += f", {row['share_of_arithmetic']:.0%} of the arithmetic limit"
        if "peer_s" in row:
            line += f"; peer {row['peer_s'] * 1e3:.1f} ms, {row['times_as_fast']:.2f} times"
        print(line)
    finish(found, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
