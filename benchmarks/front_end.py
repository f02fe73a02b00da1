"""Costs of a front end by the number of its cores, whose models compute nothing.

    python -m benchmarks.front_end [--counts 1 2 4 8 16]

Each core has the same number of streams. Rows: the front end's processor time for each token and
for each output of a core, and at rest for each core (its signs of life are taken in).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from quire import EngineArgs, SamplingParams
from quire.bench.report import add_output_flag, finish
from quire.engine import launcher
from quire.engine.async_llm import AsyncLLM
from quire.engine.event_loop import loop_factory
from quire.engine.process import core_pool
from quire.params import RequestOutputKind

STREAMS_OF_CORE, NUM_TOKENS, INPUT_LEN = 8, 512, 64


async def measure(num_cores: int, idle_s: float) -> dict[str, float]:
    """The figures of one number of cores."""
    args = EngineArgs(
        dtype="float32",
        data_parallel_size=num_cores,
        max_num_seqs=STREAMS_OF_CORE,
        num_gpu_blocks_override=400,
        max_model_len=1024,
        cpu_threads=num_cores,
        disable_log_stats=True,
    )
    front_end = await asyncio.to_thread(launcher.launch_async_front_end, args)
    engine = AsyncLLM(front_end=front_end, log_requests=False)
    try:
        await asyncio.gather(*(stream(engine, number, 4) for number in range(num_cores)))
        status = engine.front_end.client.core_status
        steps = -sum(status(index).num_steps for index in range(num_cores))
        began, cpu = time.perf_counter(), time.process_time()
        count = STREAMS_OF_CORE * num_cores
        await asyncio.gather(*(stream(engine, number, NUM_TOKENS) for number in range(count)))
        busy_s, elapsed_s = time.process_time() - cpu, time.perf_counter() - began
        await asyncio.sleep(1.0)  # the last signs of life count the steps
        steps += sum(status(index).num_steps for index in range(num_cores))
        cpu = time.process_time()
        await asyncio.sleep(idle_s)
        rest_s = time.process_time() - cpu
    finally:
        engine.shutdown()
    return {
        "num_cores": num_cores,
        "tokens_per_second": count * NUM_TOKENS / elapsed_s,
        "us_per_token": 1e6 * busy_s / (count * NUM_TOKENS),
        "us_per_output": 1e6 * busy_s / steps,
        "idle_us_per_core_and_second": 1e6 * rest_s / idle_s / num_cores,
    }


async def stream(engine: AsyncLLM, number: int, num_tokens: int) -> None:
    """One request, with different ids from the others."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    prompt = {"prompt_token_ids": [(7 * number + place) % 250 for place in range(INPUT_LEN)]}
    async for _ in engine.generate(prompt, params, f"{number}-{num_tokens}"):
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    add_output_flag(parser)
    args = parser.parse_args()
    launcher.CORE_PROGRAM = core_pool.CORE_PROGRAM = "benchmarks.stand_ins.steady_main"
    root = str(Path(__file__).parents[1])  # a core imports its program before it is told where
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    print("| cores | tokens/s | us per token | us per output | at rest, us per core and s |")
    print("| --- | --- | --- | --- | --- |")
    rows = []
    for count in args.counts:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            row = runner.run(measure(count, args.idle_seconds))
        rows.append(row)
        print(
            f"| {count} | {row['tokens_per_second']:.0f} | {row['us_per_token']:.1f} | "
            f"{row['us_per_output']:.0f} | {row['idle_us_per_core_and_second']:.0f} |",
            flush=True,
        )
    finish({"rows": rows}, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
