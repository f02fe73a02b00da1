"""Tokens per second of many random requests that are there from the start."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import psutil

from quire.bench.report import add_output_flag, at_least, finish, print_share
from quire.bench.workload import (
    add_model_flags,
    as_prompts,
    engine_args_from,
    open_llm,
    prompts_of,
    sampling,
    settings,
)

if TYPE_CHECKING:
    from quire.bench.trials import Timing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire bench throughput`."""
    parser.usage = "quire bench throughput [flags]"
    parser.add_argument("--dataset-name", choices=["random"], default="random")
    parser.add_argument("--input-len", "--random-input-len", type=at_least(1), default=128)
    parser.add_argument("--output-len", "--random-output-len", type=at_least(1), default=64)
    parser.add_argument("--num-prompts", type=at_least(1), default=32)
    parser.add_argument(
        "--num-warmups", type=at_least(0), default=1, help="requests before the clock runs"
    )
    parser.add_argument("--num-trials", type=at_least(1), default=1, help="the median counts")
    parser.add_argument("--n", type=at_least(1), default=1, help="completions of each prompt")
    add_output_flag(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the requests and print the rates."""
    # These import torch, which the command's help does not need.
    from quire.bench.trials import Bench, run_offline
    from quire.bench.workload_limits import Workload

    start = time.perf_counter()
    plan = engine_args_from(args).create_engine_config()
    prompts = prompts_of(plan, args.num_prompts + args.num_warmups, args.input_len)
    work = Workload.on(plan, args.num_prompts * args.n, args.input_len, args.output_len)
    outputs: list[Any] = []
    with open_llm(plan) as llm:
        ready_s = time.perf_counter() - start
        params = sampling(args.output_len, args)
        # other prompts than those of the trials, so that nothing of these is cached
        llm.generate(as_prompts(prompts[args.num_prompts :]), params, use_tqdm=False)
        # before LimitProbe takes its half GiB
        resident = psutil.Process().memory_info().rss

        def trial() -> Timing:
            llm.reset_prefix_cache()
            timing, outputs[:] = run_offline(llm, as_prompts(prompts[: args.num_prompts]), params)
            return timing

        bench = Bench.of(plan, work)
        trials = bench.trials(args.num_trials, trial)
    elapsed = statistics.median(timing.elapsed_s for timing, _ in trials)
    num_prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    figures = {
        **settings(plan, args),
        "elapsed_time": elapsed,
        "elapsed_times": [timing.elapsed_s for timing, _ in trials],
        "cpu_time": statistics.median(timing.cpu_s for timing, _ in trials),
        "ready_time": ready_s,
        "resident_bytes": resident,
        "num_requests": len(outputs),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_prompt + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        **bench.figures(trials),
    }
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    print_share(figures)
    finish(figures, args.output_json)
    return 0
