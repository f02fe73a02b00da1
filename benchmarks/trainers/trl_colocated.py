"""GRPO of TRL, unmodified, with an engine of Quire in its process: python trl_colocated.py [sleep].

Needs the package trl beside quire, and `quire.as_vllm` (docs/compatibility.md). A tiny model is
trained for some steps; before each generation TRL gives the engine the module's weights, tensor by
tensor. At the end the engine's log-probabilities are compared with the module's, which differ by
the rounding of bfloat16, and with those of an engine that is started with the module's weights,
which are the same to the last bit. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

STEPS = 4
PROMPT = list(range(3, 20))


def answers(llm: Any) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    [completion] = output.outputs
    return completion.token_ids, [next(iter(p.values())).logprob for p in completion.logprobs]


def main() -> int:
    """Train and compare; the exit code is 1 where the engine is not the trainer's policy."""
    import quire.as_vllm  # noqa: F401  before trl looks for vllm

    os.environ["QUIRE_ENABLE_MULTIPROCESSING"] = "0"
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from vllm import LLM

    from quire.testing import make_checkpoint

    sleeps = "sleep" in sys.argv[1:]
    base = Path(tempfile.mkdtemp())
    shape = {"num_hidden_layers": 2, "vocab_size": 320}
    folder = make_checkpoint(base / "model", shape, "qwen3", dtype="float32")
    data = Dataset.from_dict({"prompt": ["abc def", "hello", "one two", "x y z"] * 8})
    seconds: list[float] = []
    args = GRPOConfig(
        output_dir=str(base / "out"), max_steps=STEPS, per_device_train_batch_size=4,
        num_generations=4, max_completion_length=8, learning_rate=1e-2, use_cpu=True, bf16=False,
        report_to=[], logging_steps=1, save_strategy="no", use_vllm=True, vllm_mode="colocate",
        vllm_max_model_length=64, vllm_gpu_memory_utilization=0.05, vllm_enable_sleep_mode=sleeps,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
        args=args,
        train_dataset=data,
    )
    engine = trainer.vllm_generation
    sync = engine.sync_weights

    def timed() -> None:
        began = time.perf_counter()
        sync()
        seconds.append(time.perf_counter() - began)

    engine.sync_weights = timed
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    engine.sync_weights()
    if sleeps:
        engine.llm.wake_up()
    ids, mine = answers(engine.llm)
    module = trainer.model.eval()
    with torch.no_grad():
        logits = module(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].float()
    theirs = logits.log_softmax(-1)[range(len(ids)), ids]
    rounding = float((torch.tensor(mine) - theirs).abs().max())
    module.save_pretrained(base / "trained")
    for file in folder.glob("*token*"):
        (base / "trained" / file.name).write_bytes(file.read_bytes())
    fresh = LLM(str(base / "trained"), max_model_len=64, max_num_seqs=8,
                kv_cache_memory_bytes=1 << 22)  # fmt: skip
    is_same = answers(fresh) == (ids, mine)
    moved = max(float((p.detach() - before[n]).abs().max()) for n, p in module.named_parameters())
    again = AutoModelForCausalLM.from_pretrained(base / "trained").num_parameters()
    figures = {
        "steps": STEPS, "sleeps": sleeps, "weights moved by": moved, "parameters": again,
        "largest difference from transformers": rounding,
        "same bits as a start with these weights": is_same,
        "syncs": len(seconds), "sync_ms": round(1e3 * sorted(seconds)[len(seconds) // 2], 2),
    }  # fmt: skip
    print(json.dumps(figures))
    return 0 if is_same and rounding < 0.2 and moved > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
