"""Seconds for one batch of random requests, from the first token of input to the last of output."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.bench.report import add_output_flag, at_least, finish, percentile, print_share
from quire.bench.workload import (
    add_model_flags,
    as_prompts,
    engine_args_from,
    open_llm,
    prompts_of,
    sampling,
    settings,
)
from quire.params import RequestOutputKind

if TYPE_CHECKING:
    from quire.bench.trials import Timing

_PERCENTS = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire bench latency`."""
    parser.usage = "quire bench latency [flags]"
    parser.add_argument("--input-len", type=at_least(1), default=32)
    parser.add_argument("--output-len", type=at_least(1), default=128)
    parser.add_argument("--batch-size", type=at_least(1), default=8)
    parser.add_argument("--num-iters-warmup", type=at_least(0), default=2)
    parser.add_argument("--num-iters", type=at_least(1), default=10)
    parser.add_argument("--n", type=at_least(1), default=1, help="completions of each prompt")
    add_output_flag(parser)
    add_model_flags(parser)


def print_parts(figures: Mapping[str, Any]) -> None:
    """Prefill and decode by themselves."""
    print(
        f"First tokens after {figures['prefill_seconds']:.3f} s "
        f"({figures['prefill_share_of_machine_limit']:.0%} of the limit)"
    )
    if "decode_tokens_per_second" in figures:
        print(
            f"After them {figures['decode_tokens_per_second']:.2f} tokens/s "
            f"({figures['decode_share_of_machine_limit']:.0%} of the limit)"
        )


def run(args: argparse.Namespace) -> int:
    """Run the batch again and again and print its times. Prefix caching is off unless asked for."""
    # These import torch, which the command's help does not need.
    from quire.bench.trials import Bench, run_stepwise
    from quire.bench.workload_limits import Workload

    engine_args = engine_args_from(args)
    if engine_args.enable_prefix_caching is None:
        # each trial has the same prompts, and would find them cached
        engine_args.enable_prefix_caching = False
    plan = engine_args.create_engine_config()
    prompts = as_prompts(prompts_of(plan, args.batch_size, args.input_len))
    work = Workload.on(plan, args.batch_size * args.n, args.input_len, args.output_len)
    with open_llm(plan) as llm:
        params = sampling(args.output_len, args)
        params.output_kind = RequestOutputKind.DELTA

        def trial() -> Timing:
            return run_stepwise(llm.llm_engine, prompts, params)

        for _ in range(args.num_iters_warmup):
            trial()
        bench = Bench.of(plan, work)
        trials = bench.trials(args.num_iters, trial)
    latencies = [timing.elapsed_s for timing, _ in trials]
    average = sum(latencies) / len(latencies)
    num_output = args.batch_size * args.n * args.output_len
    figures = {
        **settings(plan, args),
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in _PERCENTS},
        "elapsed_time": average,
        "num_requests": args.batch_size,
        "total_num_tokens": args.batch_size * args.input_len + num_output,
        "output_tokens_per_second": num_output / average,
        **bench.figures(trials),
    }
    print(f"Avg latency: {average} seconds")
    for percent in _PERCENTS:
        print(f"{percent}% percentile latency: {figures['percentiles'][str(percent)]} seconds")
    print_parts(figures)
    print_share(figures)
    finish(figures, args.output_json)
    return 0
