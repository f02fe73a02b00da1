"""Quire: `LLM.generate`; kinds are bfloat16, float32, int8, int4 (weights; the latter two with
bfloat16 activations).
"""

from __future__ import annotations

from typing import Any

from protocol import Generate, serve

from quire import LLM, SamplingParams


def open_engine(request: dict[str, Any]) -> Generate:
    """An engine without prefix cache, on all cores."""
    kind = request["kind"]
    is_rounded = kind in ("int8", "int4")
    llm = LLM(
        model=request["model"],
        dtype="bfloat16" if is_rounded else kind,
        quantization=kind if is_rounded else None,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_num_seqs=request["max_prompts"],
        max_model_len=request["max_len"],
        speculative_config=request.get("speculative_config"),
        **request.get("engine_args", {}),
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
