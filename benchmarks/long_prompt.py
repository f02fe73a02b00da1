"""How much do long prompts disturb those that decode, and what does it cost to prevent it?

Several streams decode; then long prompts arrive one after the other. The gaps between a stream's
outputs are measured without them and while they are computed, with each of several values of
`max_stall_ms` (0: steps are as large as `max_num_batched_tokens`), in turns. Throughput is that of
all tokens, of prompts and of streams, while the prompts are computed; and of the same work, which
streams that stood still finish later: a prompt and streams of `--stream-len` tokens, all of which
begin together, until the last of them has ended.

    PYTHONPATH=src python benchmarks/long_prompt.py --random-model 0.6b --stalls 0 250
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from quire.bench.report import add_output_flag, finish, percentile
from quire.bench.workload import random_model
from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.params import RequestOutputKind, SamplingParams
from quire.testing.checkpoints import make_checkpoint

POSITIONS = 8192


@dataclass
class Gaps:
    """Seconds between two outputs of a stream, of all streams, while `is_open`."""

    is_open: bool = False
    found: list[float] = field(default_factory=list)

    def take(self) -> list[float]:
        """The gaps so far; begins again."""
        found, self.found = self.found, []
        return found


async def decode(
    engine: AsyncLLM, number: int, gaps: Gaps, num_tokens: int = POSITIONS - 64
) -> None:
    """One stream, which does not end by itself unless it is given few tokens."""
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        max_tokens=num_tokens,
    )
    last = time.perf_counter()
    prompt = {"prompt_token_ids": [number + 5] * 16}
    async for _ in engine.generate(prompt, params, f"stream-{number}-{num_tokens}"):
        now = time.perf_counter()
        if gaps.is_open:
            gaps.found.append(now - last)
        last = now


async def prefill(engine: AsyncLLM, num_tokens: int, salt: int) -> float:
    """The seconds until the first token of a long prompt."""
    ids = [7 + (place * 31 + salt) % 900 for place in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    began = time.perf_counter()
    async for _ in engine.generate({"prompt_token_ids": ids}, params, f"long-{salt}"):
        continue
    return time.perf_counter() - began


async def measure(args: argparse.Namespace, folder: Path, stall_ms: int) -> dict[str, float]:
    """The gaps with one goal, in milliseconds."""
    wish = AsyncEngineArgs(
        model=str(folder),
        dtype=args.dtype,
        quantization=args.quantization,
        max_model_len=POSITIONS,
        max_num_seqs=args.streams + 1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_bytes,
        max_stall_ms=stall_ms,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine = AsyncLLM.from_engine_args(wish)
    gaps = Gaps()
    streams = [asyncio.create_task(decode(engine, number, gaps)) for number in range(args.streams)]
    try:
        await asyncio.sleep(args.warm_up_s)
        gaps.is_open = True
        await asyncio.sleep(args.seconds)
        alone = gaps.take()
        await prefill(engine, args.learning_len, salt=0)  # speeds are learnt
        gaps.take()
        began = time.perf_counter()
        first = [await prefill(engine, args.prompt_len, 1 + i) for i in range(args.prompts)]
        seconds = time.perf_counter() - began
        beside = gaps.take()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        same_work_s = await work(engine, args, gaps) if args.stream_len else 0.0
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        engine.shutdown()
    return {
        "max_stall_ms": stall_ms,
        "alone_p50_ms": 1e3 * percentile(alone, 50),
        "alone_p99_ms": 1e3 * percentile(alone, 99),
        "beside_p50_ms": 1e3 * percentile(beside, 50),
        "beside_p99_ms": 1e3 * percentile(beside, 99),
        "beside_max_ms": 1e3 * max(beside),
        "long_first_token_s": percentile(first, 50),
        "tokens_per_second": (args.prompts * args.prompt_len + len(beside)) / seconds,
        "same_work_s": same_work_s,
    }


async def work(engine: AsyncLLM, args: argparse.Namespace, gaps: Gaps) -> float:
    """The seconds that a prompt and streams of a given length take together."""
    began = time.perf_counter()
    streams = [decode(engine, number, gaps, args.stream_len) for number in range(args.streams)]
    await asyncio.gather(*streams, prefill(engine, args.prompt_len, salt=999))
    return time.perf_counter() - began


def main() -> int:
    """Measure with each goal in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random-model", default="0.6b", help="as make_checkpoint has them")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=8_000)
    parser.add_argument("--learning-len", type=int, default=4_000)
    parser.add_argument("--stream-len", type=int, default=320, help="0: without the same work")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--stalls", type=int, nargs="+", default=[0, 250])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warm-up-s", type=float, default=2.0)
    parser.add_argument("--kv-bytes", type=int, default=4 << 30)
    add_output_flag(parser)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if args.dtype == "bfloat16":
            checkpoint = random_model(args.random_model)
        else:
            path = Path(folder) / "model"
            checkpoint = make_checkpoint(path, args.random_model, dtype=args.dtype)
        for stall_ms in args.stalls * args.rounds:
            row = asyncio.run(measure(args, checkpoint, stall_ms))
            print(", ".join(f"{name} {value:.2f}" for name, value in row.items()))
            rows.append(row)
    finish({"rows": rows, "streams": args.streams, "prompt_len": args.prompt_len}, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
