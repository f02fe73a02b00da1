"""Microseconds of scheduler work per decoding request and step, and per short request from its
arrival to its end, without a model.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from quire.bench.report import add_output_flag, at_least, finish
from quire.cli.bench import run_measurement
from quire.params import SamplingParams
from quire.scheduling.request import Request
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import SchedulerConfig, StepsPlan
from quire.step.plan import StepPlan
from quire.step.result import StepResult

SHORT_INPUT, SHORT_OUTPUT = 48, 4
"""Tokens of short requests, of which thousands are admitted in a second."""
_TOKEN = 7
"""The token that the fake runner samples; it ends nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m benchmarks.scheduler`."""
    parser.add_argument("--num-requests", type=at_least(1), nargs="+", default=[256, 1024])
    parser.add_argument("--num-steps", type=at_least(1), default=300, help="steps of one trial")
    parser.add_argument("--num-trials", type=at_least(1), default=5, help="the fastest counts")
    parser.add_argument("--input-len", type=at_least(1), default=128)
    parser.add_argument("--block-size", type=at_least(1), default=32)
    parser.add_argument("--num-drafts", type=at_least(0), default=0, help="of a request and step")
    parser.add_argument("--error", type=float, default=0.3, help="share of drafts that are wrong")
    add_output_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each number of requests and print the cost."""
    costs, naive = {}, {}
    for count in args.num_requests:
        shape = (args.num_steps, args.input_len, args.block_size, args.num_drafts, args.error)
        trials = range(args.num_trials)
        costs[str(count)] = min(decode_cost_us(count, *shape) for _ in trials)
        naive[str(count)] = min(naive_cost_us(count, args.num_steps) for _ in trials)
        print(
            f"{count} requests: schedule + update take {costs[str(count)]:.3f} us per request and "
            f"step; a bare loop over the requests takes {naive[str(count)]:.3f} us"
        )
    short = min(short_request_cost_us(args.block_size) for _ in range(args.num_trials))
    print(
        f"a request of {SHORT_INPUT} tokens in and {SHORT_OUTPUT} out takes {short:.1f} us in all"
    )
    finish(
        {
            "us_per_short_request": short,
            "us_per_request_step": costs,
            "bare_loop_us_per_request_step": naive,
            "num_steps": args.num_steps,
            "num_trials": args.num_trials,
            "input_len": args.input_len,
            "block_size": args.block_size,
            "num_drafts": args.num_drafts,
            "error": args.error,
        },
        args.output_json,
    )
    return 0


def decode_cost_us(
    num_requests: int,
    num_steps: int,
    input_len: int,
    block_size: int,
    num_drafts: int = 0,
    error: float = 0.0,
) -> float:
    """Time of schedule() and update() while all requests decode, per request and step. Each
    verifies `num_drafts` drafts in each step, and each of these is wrong with such a probability.

    Lengths differ, so that block boundaries spread over the steps as they do in service.
    """
    scheduler = _filled(num_requests, num_steps, input_len, block_size, num_drafts)
    pick = random.Random(0)
    while True:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(fake_result(plan, num_drafts, error, pick))
        if len(plan.decode_rows) == num_requests and len(plan.decode_drafts or ()) == (
            num_requests if num_drafts else 0
        ):
            break
    spent = 0.0
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None and len(plan.decode_rows) == num_requests
        result = fake_result(plan, num_drafts, error, pick)
        again = time.perf_counter()
        scheduler.update(result)
        spent += time.perf_counter() - again + middle - start
    return spent / (num_steps * num_requests) * 1e6


def short_request_cost_us(block_size: int, num_requests: int = 1500) -> float:
    """Processor time of a short request from its arrival to its end: all arrive at once, and 256
    run at a time.
    """
    steps = StepsPlan(max_num_seqs=256, max_num_batched_tokens=8192)
    config = SchedulerConfig(
        steps=steps, max_len=512, key_size=block_size, num_blocks=1 + 256 * 512
    )
    scheduler, pick = Scheduler(config), random.Random(0)
    params = SamplingParams(max_tokens=SHORT_OUTPUT, ignore_eos=True, temperature=0.0)
    prompts = [[pick.randrange(1000) for _ in range(SHORT_INPUT)] for _ in range(num_requests)]
    start = time.process_time()
    for handle, prompt in enumerate(prompts):
        scheduler.add(Request(handle, prompt, params))
    while (plan := scheduler.schedule()) is not None:
        scheduler.update(fake_result(plan))
    return (time.process_time() - start) / num_requests * 1e6


def fake_result(
    plan: StepPlan, num_drafts: int = 0, error: float = 0.0, pick: random.Random | None = None
) -> StepResult:
    """A runner that samples the same harmless token everywhere, and drafts it."""
    if not num_drafts or pick is None:
        return StepResult(plan.step_id, [_TOKEN] * len(plan.sampled_rows))
    counts = []
    for most in plan.sampled_drafts:
        count = 1
        while count <= most and pick.random() >= error:
            count += 1
        counts.append(count)
    ready = [num_drafts] * len(counts)
    return StepResult(plan.step_id, [_TOKEN] * sum(counts), counts=counts, num_drafts=ready)


def _filled(
    num_requests: int, num_steps: int, input_len: int, block_size: int, num_drafts: int
) -> Scheduler:
    length = input_len + (num_requests + 2 * num_steps) * (num_drafts + 1) + 64
    length += block_size
    scheduler = Scheduler(
        SchedulerConfig(
            steps=StepsPlan(
                max_num_seqs=num_requests,
                max_num_batched_tokens=max(8192, num_requests * (num_drafts + 1)),
            ),
            max_len=length,
            key_size=block_size,
            num_blocks=1 + num_requests * -(-length // block_size),
            num_drafts=num_drafts,
        )
    )
    for handle in range(num_requests):
        # Different first tokens: no request may wait for another's blocks.
        prompt = [handle + 10] + [1] * (input_len - 1 + handle % block_size)
        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
        scheduler.add(Request(handle, prompt, params))
    return scheduler


def naive_cost_us(num_requests: int, num_steps: int) -> float:
    """The least that a loop over requests costs in this Python on this machine: count, compare,
    append.
    """
    lengths = [100] * num_requests
    outputs: list[list[int]] = [[] for _ in range(num_requests)]
    limit = 100 + 2 * num_steps
    start = time.perf_counter()
    for _ in range(num_steps):
        for row in range(num_requests):
            lengths[row] += 1
            outputs[row].append(_TOKEN)
            if lengths[row] >= limit:
                raise AssertionError("the bare loop never reaches its limit")
    return (time.perf_counter() - start) / (num_steps * num_requests) * 1e6


if __name__ == "__main__":
    sys.exit(run_measurement(sys.modules[__name__], "python -m benchmarks.scheduler"))
