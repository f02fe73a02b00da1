"""What forms cost a step: the masks of many rows over a large vocabulary, apart by their parts.

Prints microseconds per token of a batch (all rows together, and per row), and as the last line
JSON. Texts are random walks through the grammar, so strings and numbers have random letters, which
is harder for masks than what a model writes.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from quire.grammar.constraint import Constraint
from quire.grammar.libraries import GrammarLibraries
from quire.grammar.masks import StepMasks
from quire.grammar.source import source_of
from quire.grammar.vocabulary import Vocabulary, VocabularySource
from quire.kernels.cpu.runtime import open_runtime
from quire.ops import select
from quire.params import SamplingParams, StructuredOutputsParams
from quire.scheduling.request import Request
from quire.step.plan import StepPlan
from quire.testing.tiny_tokenizer import write_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 6},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["guidance", "xgrammar"], default="guidance")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), args.vocab)
        start = time.perf_counter()
        vocabulary = Vocabulary.read(VocabularySource(folder, "hf", args.vocab))
        read_s = time.perf_counter() - start
        start = time.perf_counter()
        libraries = GrammarLibraries(vocabulary, args.backend, args.threads)
        libraries.prepare()
        prepare_s = time.perf_counter() - start
    measured = measure(libraries, vocabulary, args)
    result = {"read_vocabulary_s": read_s, "prepare_s": prepare_s, **measured}
    for name, value in result.items():
        print(f"{name:28} {value:12.1f}" if "us" in name else f"{name:28} {value:12.3f}")
    print(json.dumps({**vars(args), **{k: round(v, 3) for k, v in result.items()}}))


def measure(
    libraries: GrammarLibraries, vocabulary: Vocabulary, args: argparse.Namespace
) -> dict[str, float]:
    """Microseconds of each part of a step: medians over steps, which rows pass out of step."""
    rng = random.Random(0)
    form = StructuredOutputsParams(json=SCHEMA)
    start = time.perf_counter()
    compiled = libraries.compile(source_of(form))
    compile_s = time.perf_counter() - start
    ready: Future = Future()
    ready.set_result(compiled)

    def fresh(row: int) -> Request:
        made = Request(row, [1], SamplingParams(structured_outputs=form))
        made.grammar = Constraint(ready, vocabulary=lambda: vocabulary)
        return made

    requests = {row: fresh(row) for row in range(args.rows)}
    masks = StepMasks(requests, args.vocab)
    plan = StepPlan(0, [], [], [], list(range(args.rows)), [])
    ops = select(device="cpu", dtype=torch.float32, runtime=open_runtime(num_threads=args.threads))
    logits = torch.randn(args.rows, args.vocab)
    fill, advance, apply = [], [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        mask = masks.of(plan)
        fill.append(time.perf_counter() - start)
        rows, bits = torch.tensor(mask.places), torch.from_numpy(mask.bits)
        copied = logits.clone()
        start = time.perf_counter()
        ops.mask_logits(copied, rows, bits)
        apply.append(time.perf_counter() - start)
        for row, request in requests.items():
            allowed = np.unpackbits(mask.bits[row].view(np.uint8), bitorder="little").nonzero()[0]
            request.output_token_ids.append(int(allowed[rng.randrange(len(allowed))]))
        start = time.perf_counter()
        ended = [row for row, r in requests.items() if r.grammar.has_ended(r.output_token_ids)]
        advance.append(time.perf_counter() - start)
        for row in ended:
            requests[row] = fresh(row)
    micro = 1e6
    total = [a + b + c for a, b, c in zip(fill, advance, apply, strict=True)]
    return {
        "compile_ms": compile_s * 1e3,
        "fill_us": micro * float(np.median(fill)),
        "fill_mean_us": micro * float(np.mean(fill)),
        "fill_p99_us": micro * float(np.percentile(fill, 99)),
        "advance_us": micro * float(np.median(advance)),
        "apply_us": micro * float(np.median(apply)),
        "per_row_us": micro * float(np.median(total)) / args.rows,
    }


if __name__ == "__main__":
    main()
