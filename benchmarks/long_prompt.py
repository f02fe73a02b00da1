"""How much does a long prompt disturb those that decode?

So many streams decode; then a prompt of 32,000 tokens arrives. The gaps between a stream's outputs
are measured without it and while it is computed, with each of several limits on what one prompt may
take of a step (`long_prefill_token_threshold`). The model is a tiny one with random weights, since
what is looked at is who waits for whom.

    PYTHONPATH=src python benchmarks/long_prompt.py --thresholds 0 512 128
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
from quire.config.args.engine_args import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.params import RequestOutputKind, SamplingParams
from quire.testing.checkpoints import make_checkpoint

POSITIONS = 40_960
_SHAPE = {"max_position_embeddings": POSITIONS}


@dataclass
class Gaps:
    """Seconds between two outputs of a stream, of all streams, while `is_open`."""

    is_open: bool = False
    found: list[float] = field(default_factory=list)

    def take(self) -> list[float]:
        """Those so far; begin again."""
        found, self.found = self.found, []
        return found


async def decode(engine: AsyncLLM, number: int, gaps: Gaps) -> None:
    """One stream that never ends by itself."""
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        max_tokens=POSITIONS - 64,
    )
    last = time.perf_counter()
    prompt = {"prompt_token_ids": [number + 5] * 16}
    async for _ in engine.generate(prompt, params, f"stream-{number}"):
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


async def measure(args: argparse.Namespace, folder: Path, threshold: int) -> dict[str, float]:
    """The gaps with one threshold, in milliseconds."""
    wish = EngineArgs(
        model=str(folder),
        dtype="float32",
        max_num_seqs=args.streams + 1,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_bytes,
        long_prefill_token_threshold=threshold,
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
        first_token_s = await prefill(engine, args.prompt_len, threshold)
        beside = gaps.take()
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        engine.shutdown()
    return {
        "threshold": threshold,
        "alone_p50_ms": 1e3 * percentile(alone, 50),
        "alone_p99_ms": 1e3 * percentile(alone, 99),
        "beside_p50_ms": 1e3 * percentile(beside, 50),
        "beside_p99_ms": 1e3 * percentile(beside, 99),
        "beside_max_ms": 1e3 * max(beside),
        "long_first_token_s": first_token_s,
    }


def main() -> int:
    """Measure with each threshold in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=32_000)
    parser.add_argument("--thresholds", type=int, nargs="+", default=[0, 512, 128])
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warm-up-s", type=float, default=2.0)
    parser.add_argument("--kv-bytes", type=int, default=1 << 30)
    add_output_flag(parser)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", _SHAPE, dtype="float32")
        for threshold in args.thresholds:
            row = asyncio.run(measure(args, checkpoint, threshold))
            print(", ".join(f"{name} {value:.2f}" for name, value in row.items()))
            rows.append(row)
    finish({"rows": rows, "streams": args.streams, "prompt_len": args.prompt_len}, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
