"""Asynchronous GRPO of TRL with a server of Quire: python trl_async.py.

Needs the packages trl and aiohttp beside quire. `AsyncGRPOTrainer` is as installed: its worker, a
process of its own, asks the server for completions all the time, while the trainer steps; after
each step it pauses the server (`mode=keep`), sends all weights through a process group, and
resumes. What it computes attention with is a kernel for GPUs, in whose place is one in plain torch,
and the name of the GPU, for its figures of FLOPs, is "cpu". TRL reads answers by templates that it
knows: the tiny model has that of Qwen3.

At the end the server's log-probabilities are compared with the module's, which differ by rounding,
and with those of an engine that is started with the module's weights, which are the same to the
last bit. TRL's own figures are of the steps: how the trainer's probabilities of tokens compare with
those that the server has drawn them with (the ratio is 1 where the sample is of the same weights),
tokens per second of the worker, and seconds of a step. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl_server import KEY, PROMPT, free_port, rounding, started_anew

STEPS = 6


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Different letters."""
    return [float(len(set(each[0]["content"]))) for each in completions]


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *_: Any,
    softmax_scale: float | None = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention's function for rows of several lengths: causal, from the end."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    results = []
    for i in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        num_rows, num_keys = ends_q[i + 1] - ends_q[i], ends_k[i + 1] - ends_k[i]
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
        results.append(
            torch.nn.functional.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in (q[rows], k[keys], v[keys])),
                attn_mask=mask, scale=softmax_scale,
            ).transpose(0, 1)
        )  # fmt: skip
    return torch.cat(results)


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """The process of `vllm serve`, as TRL's documentation starts it."""
    command = [
        *(sys.executable, "-m", "quire.as_vllm", "-m", "vllm.entrypoints.cli.main", "serve"),
        *(str(folder), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256"),
        *("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--enable-admin"),
        *("--api-key", KEY, "--kv-cache-memory-bytes", str(1 << 24)),
        *("--weight-transfer-config", '{"backend": "nccl"}'),
    ]
    return subprocess.Popen(command)


def main() -> int:
    """Serve, train and compare; the exit code is 1 where the server is not the policy."""
    base = Path(tempfile.mkdtemp())
    os.environ |= {"VLLM_HOST_IP": "127.0.0.1"}
    import_module("quire.as_vllm")  # before trl looks for vllm
    import requests
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    from quire.testing import make_checkpoint

    torch.cuda.get_device_name = lambda device=None: "cpu"
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    shape = {"num_hidden_layers": 2, "vocab_size": 320}
    folder = make_checkpoint(base / "model", shape, "qwen3", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen3_instruct_2507_chat_template
    port = free_port()
    url = f"http://trainer:{KEY}@127.0.0.1:{port}"
    server = start_server(folder, port)
    try:
        texts = ["abc def", "hello", "one two", "x y"] * 8
        args = AsyncGRPOConfig(
            output_dir=str(base / "out"), max_steps=STEPS, per_device_train_batch_size=8,
            num_generations=4, max_completion_length=24, learning_rate=3e-3, use_cpu=True,
            bf16=False, report_to=[], save_strategy="no", vllm_server_base_url=url,
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        trainer = AsyncGRPOTrainer(
            model=str(folder),
            reward_funcs=reward,
            args=args,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict(
                {"prompt": [[{"role": "user", "content": text}] for text in texts]}
            ),
        )
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        body = {"model": str(folder), "prompt": PROMPT, "max_tokens": 8, "temperature": 0,
                "logprobs": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        reply = requests.post(f"{url}/v1/completions", json=body, timeout=60).json()
        [choice] = reply["choices"]
        found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    finally:
        server.terminate()
        server.wait()
    module = trainer.model.eval()
    moved = max(float((p.detach() - before[n]).abs().max()) for n, p in module.named_parameters())
    module.set_attn_implementation("sdpa")
    log = [each for each in trainer.state.log_history if "perf/weight_sync_s" in each]

    def each_step(name: str, digits: int) -> list[float]:
        return [round(entry[name], digits) for entry in log if name in entry]

    figures = {
        "steps": trainer.state.global_step, "train_s": round(seconds, 1), "moved by": moved,
        "largest difference from transformers": rounding(module, *found),
        "same bits as a start": found == started_anew(folder, module, base / "trained", "float32"),
        "sync_s": each_step("perf/weight_sync_s", 3), "ratio": each_step("ratio", 4),
        "steps behind": each_step("sample/staleness_mean", 1),
        "tokens_per_s": each_step("rollout/generated_tok_s", 0),
        "step_s": each_step("perf/step_s", 2),
    }  # fmt: skip
    print(json.dumps(figures))
    is_right = figures["same bits as a start"] and moved > 0 and figures["steps"] == STEPS
    return 0 if is_right and figures["largest difference from transformers"] < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
