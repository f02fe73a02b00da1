"""The peer of `quire bench throughput`: transformers' `generate` on the same model, prompts and
lengths.

    python benchmarks/peers/transformers_generate.py --random-model 0.6b --dtype bfloat16 \
        --input-len 128 --output-len 64 --num-prompts 32

All prompts are one batch, without padding, greedy. Prints the same JSON fields, so that the ratio
of two runs on one machine can be recorded; where others use the machine too, compare `cpu_time`.
Needs the packages of `quire[transformers]`.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

from quire.bench.report import add_output_flag, finish
from quire.bench.workload import random_model, random_prompts


def parse() -> argparse.Namespace:
    """The flags, named as those of `quire bench throughput`."""
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="folder or hub id")
    model.add_argument("--random-model", metavar="SHAPE")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--num-warmups", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    add_output_flag(parser)
    return parser.parse_args()


def main() -> None:
    """Load, warm up, run the batch, print."""
    args = parse()
    name = args.model or str(random_model(args.random_model))
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, args.dtype)).eval()
    ready = time.perf_counter() - start
    count = args.num_prompts
    prompts = random_prompts(
        count + args.num_warmups, args.input_len, model.config.vocab_size, args.seed
    )
    for prompt in prompts[count:]:
        generate(model, [prompt], args.output_len)
    start, cpu_start = time.perf_counter(), time.process_time()
    rows = generate(model, prompts[:count], args.output_len)
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    num_output = rows.numel() - count * args.input_len
    assert num_output == count * args.output_len, "transformers ended a request early"
    figures = {
        "engine": "transformers",
        "model_id": args.random_model or args.model,
        "dtype": args.dtype,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "num_threads": torch.get_num_threads(),
        "elapsed_time": elapsed,
        "cpu_time": cpu,
        "ready_time": ready,
        "num_requests": count,
        "total_num_tokens": rows.numel(),
        "requests_per_second": count / elapsed,
        "tokens_per_second": rows.numel() / elapsed,
        "output_tokens_per_second": num_output / elapsed,
    }
    print(f"Throughput: {figures['output_tokens_per_second']:.2f} output tokens/s")
    finish(figures, args.output_json)


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: list[list[int]], output_len: int) -> torch.Tensor:
    """Prompt and output ids of the batch; exactly `output_len` new tokens each."""
    ids = torch.tensor(prompts)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
    )


if __name__ == "__main__":
    main()
