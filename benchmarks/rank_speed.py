"""What does a model gain or lose that ranks share, beside one worker with as many threads?

The time of a decoding step of one and of several requests, and of a prompt, each the median of
rounds in turns: one worker with all threads, then `-tp` ranks that have a share of them each. Of
the ranks' time also the parts that one worker does not have: how long a rank waits for the others
and how often it sleeps meanwhile, and the processor's time of the core.

    PYTHONPATH=src python -m benchmarks.rank_speed --shape 0.6b
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from quire import LLM, SamplingParams
from quire.bench.report import add_output_flag, conclude
from quire.testing.checkpoints import make_checkpoint

AIM = 0.95
"""Share of the better speed that ranks are to reach."""


def decode_step_s(llm: LLM, rows: int, steps: int) -> float:
    """Seconds of a step in which so many requests decode, without the prompts' step."""

    def seconds(num_tokens: int) -> float:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": [7 + row] * 16} for row in range(rows)]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    short = seconds(1)
    return (seconds(1 + steps) - short) / steps


def prompt_s(llm: LLM, num_tokens: int, salt: int) -> float:
    """Seconds to the one token after a prompt of so many."""
    ids = [7 + (place * 31 + salt) % 900 for place in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return time.perf_counter() - began


def measure(llm: LLM, args: argparse.Namespace, salt: int) -> dict[str, float]:
    """One round, in milliseconds."""
    found = {}
    for rows in args.rows:
        # two prompts' steps are with them
        lost = Losses(llm, args.steps + 2, f"decode_{rows}")
        found[f"decode_{rows}_ms"] = 1e3 * decode_step_s(llm, rows, args.steps)
        found |= lost.figures()
    for tokens in args.prompts:
        lost = Losses(llm, 1, f"prompt_{tokens}")
        found[f"prompt_{tokens}_ms"] = 1e3 * prompt_s(llm, tokens, salt)
        found |= lost.figures()
    return found


class Losses:
    """Losses of ranks in some steps, from here to `figures`."""

    def __init__(self, llm: LLM, num_steps: int, name: str) -> None:
        self._executor = llm.llm_engine.model_executor
        self._num_steps, self._name = num_steps, name
        self._began = self._now()

    def _now(self) -> list[float]:
        """Waits and sleeps of all ranks, and the processor's seconds of this process."""
        pairs = self._executor.waits() if hasattr(self._executor, "waits") else []
        waits, sleeps = zip(*pairs, strict=True) if pairs else ((), ())
        return [*waits, *sleeps, time.process_time()]

    def figures(self) -> dict[str, float]:
        """Losses in a step: a rank's average wait in milliseconds, its sleeps, the core's time."""
        *passed, core_s = (b - a for a, b in zip(self._began, self._now(), strict=True))
        if not passed:
            return {}
        half = len(passed) // 2
        each = half * self._num_steps
        return {
            f"{self._name}_wait_ms": sum(passed[:half]) / 1e6 / each,
            f"{self._name}_sleeps": sum(passed[half:]) / each,
            f"{self._name}_core_ms": core_s * 1e3 / self._num_steps,
        }


def opened(folder: Path, ranks: int, args: argparse.Namespace) -> LLM:
    """An engine with so many ranks, warm."""
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=args.dtype,
        tensor_parallel_size=ranks,
        max_model_len=max(args.prompts) + 64,
        max_num_seqs=max(args.rows),
        kv_cache_memory_bytes=args.kv_bytes // ranks,
        enable_prefix_caching=False,
    )
    measure(llm, args, 0)
    return llm


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-bytes", type=int, default=256 << 20)
    add_output_flag(parser)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", args.shape)
        engines = {ranks: opened(folder, ranks, args) for ranks in (1, args.ranks)}
        rounds: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in engines}
        for salt in range(1, 1 + args.rounds):
            for ranks, llm in engines.items():
                rounds[ranks].append(measure(llm, args, salt))
    figures = {"cpus": os.cpu_count(), "shape": args.shape, "ranks": args.ranks}
    missed = []
    for key in (key for key in rounds[args.ranks][0] if key not in rounds[1][0]):
        figures[f"ranks_{key}"] = round(median(each[key] for each in rounds[args.ranks]), 2)
    for key in rounds[1][0]:
        one, many = (median(each[key] for each in rounds[ranks]) for ranks in engines)
        figures |= {key: round(one, 1), f"ranks_{key}": round(many, 1)}
        figures[f"ratio_{key.removesuffix('_ms')}"] = round(one / many, 3)
        if one / many < AIM:
            missed.append(f"{key}: {one / many:.2f} of one worker's speed")
    return conclude(figures, missed, args.output_json)


if __name__ == "__main__":
    sys.exit(main())
