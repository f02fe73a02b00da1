"""Output tokens a second with one API server process and with several.

Starts `quire serve` with each count in turn, and has `quire bench serve` send the same short
requests to each. Needs more processors than the cores of the engine and the load generator use, or
there is nothing to gain.

    PYTHONPATH=src python benchmarks/api_servers.py --counts 1 2
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from quire.bench.report import add_output_flag, finish

QUIRE = [sys.executable, "-m", "quire.cli.main"]


def start(count: int, flags: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server, and where it is."""
    command = [*QUIRE, "serve", "--port", "0", "--api-server-count", str(count), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"Serving .* at (\S+)", line):
            return process, found.group(1)
    raise RuntimeError("the server did not start: " + "".join(lines))


def load(url: str, args: argparse.Namespace) -> dict[str, float]:
    """What the load generator measured."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(*QUIRE, "bench", "serve", "--base-url", url, "--dataset-name", "random"),
                *("--random-input-len", str(args.input_len), "--ignore-eos"),
                *("--random-output-len", str(args.output_len)),
                *("--num-prompts", str(args.num_prompts), "--disable-tqdm"),
                *("--max-concurrency", str(args.concurrency)),
                *("--save-result", "--result-dir", folder, "--result-filename", "r.json"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        result = json.loads(Path(folder, "r.json").read_text())
    names = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "completed")
    return {name: result[name] for name in names}


def main() -> int:
    """Measure with each count in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=192)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    add_output_flag(parser)
    args = parser.parse_args()
    rows = []
    for count in args.counts * args.rounds:
        process, url = start(count, ["--max-num-seqs", str(args.concurrency)])
        try:
            load(url, argparse.Namespace(**{**vars(args), "num_prompts": 16}))
            rows.append({"api_servers": count, **load(url, args)})
        finally:
            process.terminate()
            process.communicate(timeout=60)
        print(rows[-1], flush=True)
    finish({"rows": rows}, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
