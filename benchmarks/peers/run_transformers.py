"""transformers: `generate` on one batch without padding; kinds are bfloat16, float16, float32."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Generate, serve
from transformers import AutoModelForCausalLM


def open_engine(request: dict[str, Any]) -> Generate:
    """The model as it comes, on all threads."""
    torch.set_num_threads(request["num_threads"])
    dtype = getattr(torch, request["kind"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], length: int) -> tuple[list[list[int]], None]:
        ids = torch.tensor(prompts)
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
        )
        return rows[:, ids.shape[1] :].tolist(), None

    return generate


if __name__ == "__main__":
    serve(open_engine)
