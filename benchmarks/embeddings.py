"""How long texts take to become vectors: one by itself, one after the other, 32 and 512 short ones
and 32 long ones, beside sentence-transformers, ONNX Runtime and the machine's arithmetic in the
same run.

The trials take turns, and the best of each counts. Between two trials the limits are measured,
which leaves nothing in the caches: texts one after the other are a client that waits for each.
Peers run in processes of their own, with the
Python that is named, which has sentence-transformers, or onnxruntime and onnxscript to export the
model. They sort by length and pad.

    PYTHONPATH=src python benchmarks/embeddings.py --model FOLDER --peer-python PYTHON \\
        --peers sentence-transformers onnxruntime
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
IN_A_ROW = 20
"""Calls of the workload that has texts one after the other."""

_SENTENCE_TRANSFORMERS = """
import json, sys, time, torch
from sentence_transformers import SentenceTransformer
model, dtype, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
options = {"dtype": getattr(torch, dtype)}
model = SentenceTransformer(model, device="cpu", model_kwargs=options)

def encode(texts):
    model.encode(texts, batch_size=32, show_progress_bar=False, normalize_embeddings=True)
"""
_ONNXRUNTIME = """
import json, sys, tempfile, time
import numpy as np, onnxruntime, torch
from tokenizers import Tokenizer
from transformers import AutoModel
folder, dtype, threads = sys.argv[1:]
model = AutoModel.from_pretrained(
    folder, dtype=getattr(torch, dtype), attn_implementation="eager"
).eval()

class States(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

ids = torch.ones(2, 8, dtype=torch.int64)
sizes = {0: torch.export.Dim("batch", max=4096), 1: torch.export.Dim("length", min=2, max=512)}
file = tempfile.mkdtemp() + "/model.onnx"
stdout, sys.stdout = sys.stdout, sys.stderr
torch.onnx.export(States(), (ids, ids), file, input_names=["ids", "mask"], dynamo=True,
                  dynamic_shapes={"ids": sizes, "mask": sizes})
sys.stdout = stdout
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(threads)
session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
tokenizer.no_padding()
tokenizer.no_truncation()

def encode(texts):
    found = sorted((e.ids for e in tokenizer.encode_batch(texts)), key=len)
    for first in range(0, len(found), 32):
        batch = found[first : first + 32]
        lengths = np.array([len(ids) for ids in batch])
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        ids = np.zeros_like(mask)
        ids[mask == 1] = np.concatenate(batch)
        states = session.run(None, {"ids": ids, "mask": mask})[0]
        means = (states * mask[..., None]).sum(1) / lengths[:, None]
        means / np.linalg.norm(means, axis=1, keepdims=True)
"""
_LOOP = """
print("ready", flush=True)
for line in sys.stdin:
    texts, calls = json.loads(line)
    start = time.perf_counter()
    for _ in range(calls):
        encode(texts)
    print((time.perf_counter() - start) / calls, flush=True)
"""
PEERS = {"sentence-transformers": _SENTENCE_TRANSFORMERS, "onnxruntime": _ONNXRUNTIME}


class Peer:
    """One of `PEERS` in a process of its own."""

    def __init__(self, name: str, python: str, model: str, dtype: str, num_threads: int) -> None:
        self.name = name
        command = [python, "-c", PEERS[name] + _LOOP, model, dtype, str(num_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def seconds(self, texts: list[str], calls: int) -> float:
        """How long it takes for these texts, the mean of so many calls."""
        assert self._process.stdin is not None
        print(json.dumps([texts, calls]), file=self._process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended")
        return line

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def workloads() -> dict[str, tuple[list[str], int]]:
    """The texts of a call, and how many calls follow one another, by name."""
    short = [SENTENCE.format(i) for i in range(512)]
    long = [" ".join(SENTENCE.format(i + j) for j in range(LONG)) for i in range(32)]
    return {
        "1 short": (short[:1], 1),
        "1 by 1": (short[:1], IN_A_ROW),
        "32 short": (short[:32], 1),
        "512 short": (short, 1),
        "32 long": (long, 1),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Best seconds of each workload, of us and of the peer, and what the arithmetic takes."""
    llm = LLM(args.model, dtype=args.dtype, cpu_threads=args.threads)
    probe = LimitProbe(args.dtype, args.threads)
    spec = read_spec(read_config(locate(args.model)))
    peers = []
    if args.peer_python is not None:
        where = args.peer_python, args.model, args.peer_dtype or args.dtype, args.threads
        peers = [Peer(name, *where) for name in args.peers]
    found = {}
    for name, (texts, calls) in workloads().items():
        ours, limits = [], []
        theirs: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for _ in range(args.trials):
            limits.append(probe.measure().flops_per_s)
            start = time.perf_counter()
            for _ in range(calls):
                outputs = llm.embed(texts, use_tqdm=False)
            ours.append((time.perf_counter() - start) / calls)
            for peer in peers:
                theirs[peer.name].append(peer.seconds(texts, calls))
        lengths = [len(output.prompt_token_ids) for output in outputs]
        flops = sum(length * flops_per_token(spec, length) for length in lengths)
        found[name] = {
            "tokens": sum(lengths),
            "s": min(ours),
            "share_of_arithmetic": flops / max(limits) / min(ours),
            "peers": {name: min(seconds) for name, seconds in theirs.items()},
        }
    for peer in peers:
        peer.close()
    return found


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder or a hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peer-dtype", help="that of the peers; default: the same")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--peer-python", help="a Python that has the peers")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["sentence-transformers"])
    add_output_flag(parser)
    args = parser.parse_args()
    found = measure(args)
    for name, row in found.items():
        line = f"{name:10} {row['tokens']:6} tokens {row['s'] * 1e3:8.1f} ms"
        line += f", {row['share_of_arithmetic']:.0%} of the arithmetic limit"
        for peer, seconds in row["peers"].items():
            line += f"; {peer} {seconds * 1e3:.1f} ms, {seconds / row['s']:.2f} times"
        print(line)
    finish(found, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
