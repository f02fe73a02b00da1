"""What does a model gain or lose that ranks share, beside one worker with as many threads?

All engines live at the same time, and those that have no turn sleep. Turns are short (a prompt, or
a few dozen decoding steps of one or of several requests) and come in rounds, there and back again,
so that whatever else the machine does falls on all: the figure is the median of the rounds'
ratios, with its quartiles. What else runs costs ranks more than threads, which take over the work
of one that has lost its core: `undisturbed` compares the lower quartiles of a turn's steps. Of the
ranks' time also the parts that one worker does not have: how long a rank waits for the others and
how often it sleeps meanwhile, and the processor's time of the core. `huge` is the share of memory
that is on huge pages: where engines differ, as on a machine whose free memory is in pieces, their
speeds differ in all kinds of steps alike, whatever they do.

    PYTHONPATH=src python -m benchmarks.rank_speed --shape 0.6b
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles

from psutil import Process

from quire import LLM, SamplingParams
from quire.bench.report import add_output_flag, conclude
from quire.testing.checkpoints import make_checkpoint

AIM = 0.95
"""Share of the better speed that ranks are to reach."""

ONE, RANKS, AHEAD = "one", "ranks", "ahead"
"""One worker; ranks; ranks that get the next step while they compute one (async_scheduling)."""


def decode_steps_s(llm: LLM, rows: int, steps: int) -> list[float]:
    """Seconds of each step in which so many requests decode, without their prompts' step."""
    engine = llm.llm_engine
    # the first ids come with the prompts, and nothing runs while the last ones are read
    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 2, ignore_eos=True, detokenize=False
    )
    for row in range(rows):
        engine.add_request(str(row), {"prompt_token_ids": [7 + row] * 16}, params)
    read_at = []
    while engine.has_unfinished_requests():
        if len(engine.step()) == rows:
            read_at.append(time.perf_counter())
    assert len(read_at) == steps + 2, "all requests decode together"
    return [b - a for a, b in pairwise(read_at[:-1])]


def prompt_s(llm: LLM, num_tokens: int, salt: int) -> list[float]:
    """Seconds to the one token after a prompt of so many."""
    ids = [7 + (place * 31 + salt) % 900 for place in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return [time.perf_counter() - began]


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


Turn = Callable[[LLM, int], list[float]]
"""Seconds of the steps of a turn, given the number of the round."""


def in_turns(
    name: str, engines: Mapping[str, LLM], turn: Turn, num_steps: int, num_rounds: int
) -> dict[str, float | str]:
    """The figures of so many rounds, in each of which every engine has a turn."""
    for llm in engines.values():
        turn(llm, 0)
    turns: dict[str, list[list[float]]] = {key: [] for key in engines}
    losses: dict[str, list[dict[str, float]]] = {key: [] for key in engines}
    for number in range(1, 1 + num_rounds):
        for key in sorted(engines, reverse=number % 2 == 0):
            lost = Losses(engines[key], num_steps, f"{key}_{name}")
            turns[key].append(turn(engines[key], number))
            losses[key].append(lost.figures())
    figures: dict[str, float | str] = {}
    for key in engines:
        figures[f"{key}_{name}_ms"] = round(1e3 * median(map(mean, turns[key])), 2)
        for kind, of in ("", mean), ("_undisturbed", _quiet):
            if key == ONE or (kind and len(turns[key][0]) == 1):
                continue
            pairs = zip(map(of, turns[ONE]), map(of, turns[key]), strict=True)
            low, middle, high = quantiles([a / b for a, b in pairs], n=4, method="inclusive")
            ratio = f"{key}_{name}_ratio{kind}"
            figures |= {ratio: round(middle, 3), f"{ratio}_quartiles": f"{low:.3f} to {high:.3f}"}
        for what in losses[key][0]:
            figures[what] = round(median(each[what] for each in losses[key]), 2)
    return figures


def _quiet(seconds: Sequence[float]) -> float:
    """The lower quartile of a turn's steps."""
    return sorted(seconds)[len(seconds) // 4]


def opened(folder: Path, key: str, args: argparse.Namespace) -> LLM:
    """One of the engines that have turns."""
    ranks = 1 if key == ONE else args.ranks
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=args.dtype,
        tensor_parallel_size=ranks,
        max_model_len=max([*args.prompts, args.steps + 32]) + 64,
        max_num_seqs=max([*args.rows, 1]),
        kv_cache_memory_bytes=args.kv_bytes // ranks,
        enable_prefix_caching=False,
        async_scheduling=True if key == AHEAD else None,
    )


def huge_share(pids: Sequence[int]) -> float:
    """Share of these processes' memory that is on huge pages."""
    found = {"AnonHugePages": 0, "Anonymous": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size, *_ = line.split()
            if (name := name.rstrip(":")) in found:
                found[name] += int(size)
    return round(found["AnonHugePages"] / (found["Anonymous"] or 1), 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--engines", nargs="+", default=[RANKS, AHEAD], choices=[RANKS, AHEAD])
    parser.add_argument("--kv-bytes", type=int, default=256 << 20)
    add_output_flag(parser)
    args = parser.parse_args(arguments)
    turns: dict[str, tuple[Turn, int]] = {}
    for rows in args.rows:
        turns[f"decode_{rows}"] = (
            lambda llm, number, rows=rows: decode_steps_s(llm, rows, args.steps),
            args.steps + 2,
        )
    for tokens in args.prompts:
        turns[f"prompt_{tokens}"] = lambda llm, number, n=tokens: prompt_s(llm, n, number), 1
    figures: dict[str, float | str | None] = {
        "cpus": os.cpu_count(), "shape": args.shape, "ranks": args.ranks, "rounds": args.rounds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = make_checkpoint(Path(name) / "model", args.shape)
        engines: dict[str, LLM] = {}
        pids = {ONE: [os.getpid()]}
        for key in (ONE, *args.engines):
            before = {child.pid for child in Process().children(recursive=True)}
            engines[key] = stack.enter_context(opened(folder, key, args))
            now = {child.pid for child in Process().children(recursive=True)}
            pids.setdefault(key, sorted(now - before))
        for kind, (turn, num_steps) in turns.items():
            figures |= in_turns(kind, engines, turn, num_steps, args.rounds)
        figures |= {f"{key}_huge": huge_share(own) for key, own in pids.items()}
    missed = [
        f"{key}: {found}"
        for key, found in figures.items()
        if key.endswith("_ratio") and isinstance(found, float) and found < AIM
    ]
    return conclude(figures, missed, args.output_json)


if __name__ == "__main__":
    sys.exit(main())
