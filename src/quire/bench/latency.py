"""Seconds for one batch of random requests, from the first token of input to the last of output."""

from __future__ import annotations

import argparse
import time

from quire.bench.limits import Workload
from quire.bench.report import add_output_flag, finish, percentile
from quire.bench.workload import (
    add_model_flags,
    as_prompts,
    limit_figures,
    open_llm,
    random_prompts,
    sampling,
    settings,
    vocab_size,
    wishes_from,
)

_PERCENTS = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire bench latency`."""
    parser.usage = "quire bench latency [flags]"
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-iters-warmup", type=int, default=2)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--n", type=int, default=1, help="completions of each prompt")
    add_output_flag(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the batch again and again and print its times. Prefix caching is off unless asked for."""
    wishes = wishes_from(args)
    if wishes.enable_prefix_caching is None:
        wishes.enable_prefix_caching = False
    plan = wishes.create_engine_config()
    prompts = as_prompts(
        random_prompts(args.batch_size, args.input_len, vocab_size(plan), plan.seed)
    )
    latencies = []
    with open_llm(plan) as llm:
        params = sampling(args.output_len, args)
        for trial in range(-args.num_iters_warmup, args.num_iters):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if trial >= 0:
                latencies.append(time.perf_counter() - start)
    average = sum(latencies) / len(latencies)
    num_output = args.batch_size * args.n * args.output_len
    work = Workload(args.batch_size * args.n, args.input_len, args.output_len, plan.max_num_seqs)
    figures = {
        **settings(plan, args),
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in _PERCENTS},
        "elapsed_time": average,
        "num_requests": args.batch_size,
        "total_num_tokens": args.batch_size * args.input_len + num_output,
        "output_tokens_per_second": num_output / average,
        **limit_figures(plan, work, average),
    }
    print(f"Avg latency: {average} seconds")
    for percent in _PERCENTS:
        print(f"{percent}% percentile latency: {figures['percentiles'][str(percent)]} seconds")
    print(f"That is {figures['share_of_machine_limit']:.0%} of this machine's limit.")
    finish(figures, args.output_json)
    return 0
