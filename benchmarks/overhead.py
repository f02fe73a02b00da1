"""Costs of the engine itself: `AsyncLLM` with a model so small that it hardly computes.

    PYTHONPATH=src:. python -m benchmarks.overhead --random-model tiny --dtype bfloat16

64 streams at once and one alone, with the processor time of the front end and of the core per
token; then the same with a core that has no model; then the front end by itself, fed with the
columns of a core that costs nothing. In the event loop that `quire serve` has.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any

import msgspec
import psutil

from benchmarks.stand_ins.steady_core import SteadyCore
from quire.bench.report import add_output_flag, at_least, finish, percentile
from quire.bench.workload import add_model_flags, engine_args_from, random_prompts
from quire.cli.bench import run_measurement
from quire.config.plan import EnginePlan
from quire.engine.async_llm import AsyncLLM
from quire.engine.client.client import AsyncEngineCoreClient
from quire.engine.client.multiprocess import AsyncMPClient
from quire.engine.event_loop import loop_factory
from quire.engine.frontend.frontend import FrontEnd, build_front_end
from quire.engine.launcher import start
from quire.params import RequestOutputKind, SamplingParams
from quire.processes.child_process import ChildProcess
from quire.testing.loop_client import LoopClient


class OverheadResult(msgspec.Struct):
    """One run: times in seconds, processor time of both sides included."""

    num_tokens: int
    elapsed_s: float
    front_end_cpu_s: float
    core_cpu_s: float
    first_token_s: list[float]
    per_token_s: list[float]

    def per_token(self, seconds: float) -> float:
        """Microseconds of that for each token."""
        return 1e6 * seconds / self.num_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m benchmarks.overhead`."""
    parser.usage = "python -m benchmarks.overhead [flags]"
    parser.add_argument("--input-len", type=at_least(1), default=128)
    parser.add_argument("--output-len", type=at_least(1), default=128)
    parser.add_argument("--concurrency", type=at_least(1), default=64)
    parser.add_argument("--num-rounds", type=at_least(1), default=4, help="requests of each stream")
    parser.add_argument("--idle-seconds", type=float, default=5.0, help="how long to watch it rest")
    add_output_flag(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    plan = engine_args_from(args).create_engine_config()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        measured = runner.run(_measure(plan, args))
    figures = {
        "model_id": args.random_model or plan.model.model,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "concurrency": args.concurrency,
        **measured,
    }
    finish(figures, args.output_json)
    return 0


async def _measure(plan: EnginePlan, args: argparse.Namespace) -> dict[str, Any]:
    engine = AsyncLLM.from_vllm_config(plan)
    try:
        await stream(engine, plan, args, args.concurrency, 1)
        many = await stream(engine, plan, args, args.concurrency, args.num_rounds)
        one = await stream(engine, plan, args, 1, 2 * args.num_rounds)
        idle_share = await rest(engine, args.idle_seconds)
    finally:
        engine.shutdown()
    bare_many, bare_one = await _without_model(plan, args)
    alone = await stream(front_end_alone(plan), plan, args, args.concurrency, args.num_rounds)
    rate = many.num_tokens / many.elapsed_s
    print(
        f"{args.concurrency} streams: {rate:.0f} tokens/s, "
        f"{1e3 * percentile(many.per_token_s, 50):.3f} ms per output token, "
        f"first token after {1e3 * percentile(many.first_token_s, 50):.1f} ms"
    )
    print(
        f"  processor time per token: front end {many.per_token(many.front_end_cpu_s):.1f} us, "
        f"core {many.per_token(many.core_cpu_s):.1f} us (model included)"
    )
    print(f"1 stream: {1e3 * percentile(one.per_token_s, 50):.3f} ms per output token")
    bare_rate = bare_many.num_tokens / bare_many.elapsed_s
    print(
        f"Without a model, {args.concurrency} streams: {bare_rate:.0f} tokens/s; per token front "
        f"end {bare_many.per_token(bare_many.front_end_cpu_s):.1f} us, "
        f"core {bare_many.per_token(bare_many.core_cpu_s):.1f} us"
    )
    alone_ms = 1e3 * percentile(bare_one.per_token_s, 50)
    print(f"Without a model, 1 stream: {alone_ms:.3f} ms per output token")
    print(f"Front end alone: {alone.per_token(alone.front_end_cpu_s):.2f} us per token")
    print(f"At rest: {idle_share:.2%} of a processor")
    return {
        "output_tokens_per_second": rate,
        "ms_per_output_token": 1e3 * percentile(many.per_token_s, 50),
        "ms_to_first_token": 1e3 * percentile(many.first_token_s, 50),
        "front_end_us_per_token": many.per_token(many.front_end_cpu_s),
        "core_us_per_token": many.per_token(many.core_cpu_s),
        "ms_per_output_token_alone": 1e3 * percentile(one.per_token_s, 50),
        "bare_output_tokens_per_second": bare_rate,
        "bare_front_end_us_per_token": bare_many.per_token(bare_many.front_end_cpu_s),
        "bare_core_us_per_token": bare_many.per_token(bare_many.core_cpu_s),
        "bare_ms_per_output_token_alone": alone_ms,
        "front_end_alone_us_per_token": alone.per_token(alone.front_end_cpu_s),
        "idle_share": idle_share,
    }


async def _without_model(
    plan: EnginePlan, args: argparse.Namespace
) -> tuple[OverheadResult, OverheadResult]:
    """All streams, and one, on an engine whose core computes nothing."""
    engine = engine_without_model(plan)
    try:
        await stream(engine, plan, args, args.concurrency, 1)
        many = await stream(engine, plan, args, args.concurrency, args.num_rounds)
        return many, await stream(engine, plan, args, 1, 2 * args.num_rounds)
    finally:
        engine.shutdown()


def engine_without_model(plan: EnginePlan) -> AsyncLLM:
    """An engine with a core process that has everything but a model."""
    cores = start(plan, ChildProcess("benchmarks.stand_ins.steady_main"))
    client = AsyncMPClient(cores, plan.parallel.max_core_restarts)
    front_end: FrontEnd[AsyncEngineCoreClient] = build_front_end(plan, client)
    client.wait_until_ready()
    return AsyncLLM(front_end=front_end, log_requests=False)


def front_end_alone(plan: EnginePlan) -> AsyncLLM:
    """An engine whose core gives every request its next token for nothing."""
    core = SteadyCore(plan.model.vocab_size)
    client = LoopClient(core, lambda: core.has_work)
    front_end: FrontEnd[AsyncEngineCoreClient] = build_front_end(plan, client)
    return AsyncLLM(front_end=front_end, log_requests=False)


async def stream(
    engine: AsyncLLM, plan: EnginePlan, args: argparse.Namespace, concurrency: int, num_rounds: int
) -> OverheadResult:
    """Keep `concurrency` streams busy, each with one request after the other."""
    prompts = random_prompts(concurrency, args.input_len, plan.model.vocab_size, plan.model.seed)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=args.output_len,
        ignore_eos=True,
        detokenize=not args.disable_detokenize,
        output_kind=RequestOutputKind.DELTA,
    )
    found = OverheadResult(0, 0.0, 0.0, 0.0, [], [])

    async def one_stream(index: int) -> None:
        for round_ in range(num_rounds):
            prompt = {"prompt_token_ids": prompts[index]}
            await _consume(engine, prompt, params, f"{index}-{round_}", found)

    start, cpu, core_cpu = time.perf_counter(), time.process_time(), _core_cpu_s(engine)
    await asyncio.gather(*(one_stream(index) for index in range(concurrency)))
    found.elapsed_s = time.perf_counter() - start
    found.front_end_cpu_s = time.process_time() - cpu
    found.core_cpu_s = _core_cpu_s(engine) - core_cpu
    return found


async def rest(engine: AsyncLLM, seconds: float) -> float:
    """The processor time that an engine without requests takes, front end and cores together."""
    cpu, core_cpu = time.process_time(), _core_cpu_s(engine)
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu + _core_cpu_s(engine) - core_cpu) / seconds


async def _consume(
    engine: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str, found: OverheadResult
) -> None:
    start = time.perf_counter()
    first, count = 0.0, 0
    async for output in engine.generate(prompt, params, request_id):
        if not count:
            first = time.perf_counter()
        count += len(output.outputs[0].token_ids)
    found.num_tokens += count
    found.first_token_s.append(first - start)
    found.per_token_s.append((time.perf_counter() - first) / max(1, count - 1))


def _core_cpu_s(engine: AsyncLLM) -> float:
    """Of the cores' processes; 0 where the core is in this one."""
    client = engine.front_end.client
    pids = {client.core_status(index).pid for index in client.engine_indices}
    times = [psutil.Process(pid).cpu_times() for pid in pids if pid != psutil.Process().pid]
    return float(sum(spent.user + spent.system for spent in times))


if __name__ == "__main__":
    sys.exit(run_measurement(sys.modules[__name__], "python -m benchmarks.overhead"))
