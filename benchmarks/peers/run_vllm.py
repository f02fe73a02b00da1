"""vLLM's CPU build, offline; kinds are bfloat16, float16, float32.

The best setting for few cores: no core kept for the front end, one thread bound to each, no prefix
cache, engine in this process.
"""

from __future__ import annotations

import os
from typing import Any

from protocol import Generate, serve


def open_engine(request: dict[str, Any]) -> Generate:
    """An engine with 1 GiB of KV cache, or what the requests need."""
    os.environ |= {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{request['num_threads'] - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "6",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        dtype=request["kind"],
        max_model_len=request["max_len"],
        max_num_seqs=request["max_prompts"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=request.get("speculative_config"),
    )

    def generate(prompts: list[list[int]], length: int) -> tuple[list[list[int]], float | None]:
        params = SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        times = outputs[0].metrics
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return ids, times.last_token_ts - times.first_token_ts

    return generate


if __name__ == "__main__":
    serve(open_engine)
