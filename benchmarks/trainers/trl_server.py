"""TRL's server and its client, unmodified, with Quire as the engine: python trl_server.py.

Needs the package trl beside quire. `trl vllm-serve` is started by `python -m quire.as_vllm`, with
the flags for the routes of trainers and a key, which the client's library reads from a file of the
format of .netrc. TRL refuses a trainer whose device is a CPU, in the one method that opens the
group: it is told "cuda", its default, which on a machine without a GPU has tensors go by gloo.
First TRL's `VLLMClient` sends a module's weights by itself, then a `GRPOTrainer` trains with this
server. At the end log-probabilities of the server are compared with the module's, which differ by
the rounding of bfloat16, and with those of an engine that is started with the module's weights,
which are the same to the last bit. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

STEPS = 3
PROMPT = list(range(3, 20))
KEY = "key-of-a-trainer"


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """The process of `trl vllm-serve`."""
    trl = shutil.which("trl", path=str(Path(sys.executable).parent))
    assert trl is not None, "the package trl has a program of this name"
    command = [
        *(sys.executable, "-m", "quire.as_vllm", trl, "vllm-serve", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--max_model_len", "64"),
        *("--enable-admin", "--api-key", KEY, "--kv-cache-memory-bytes", str(1 << 24)),
    ]
    return subprocess.Popen(command)


def answers(client: Any) -> tuple[list[int], list[float]]:
    """Greedy tokens of the server, and their log-probabilities."""
    kwargs = {"ignore_eos": True}
    found = client.generate([PROMPT], temperature=0.0, max_tokens=8, generation_kwargs=kwargs)
    [ids], [logprobs] = found["completion_ids"], found["logprobs"]
    return ids, [position[0] for position in logprobs]


def rounding(module: Any, ids: list[int], mine: list[float]) -> float:
    """The largest difference of log-probabilities from the module's."""
    with torch.no_grad():
        logits = module(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].float()
    theirs = logits.log_softmax(-1)[range(len(ids)), ids]
    return float((torch.tensor(mine) - theirs).abs().max())


def started_anew(
    folder: Path, module: Any, base: Path, dtype: str = "auto"
) -> tuple[list[int], list[float]]:
    """The same of an engine that is started with the module's weights."""
    from vllm import LLM, SamplingParams

    module.save_pretrained(base)
    for file in folder.glob("*token*"):
        (base / file.name).write_bytes(file.read_bytes())
    llm = LLM(str(base), max_model_len=64, kv_cache_memory_bytes=1 << 24, dtype=dtype)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    [completion] = output.outputs
    return completion.token_ids, [next(iter(p.values())).logprob for p in completion.logprobs]


def send_by_hand(client: Any, folder: Path, base: Path) -> dict[str, Any]:
    """Send a module's weights as TRL's documentation does."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first = answers(client)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.02)
    began = time.perf_counter()
    client.update_model_params(module)
    seconds = time.perf_counter() - began
    client.reset_prefix_cache()
    found = answers(client)
    return {
        "client, answers differ from before": found != first,
        "client, largest difference from transformers": rounding(module, *found),
        "client, same bits as a start": found == started_anew(folder, module, base / "by hand"),
        "client, update_ms": round(1e3 * seconds, 1),
    }


def train(url: str, folder: Path, base: Path) -> dict[str, Any]:
    """GRPO with the server."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(base / "out"), max_steps=STEPS, per_device_train_batch_size=4,
        num_generations=4, max_completion_length=8, learning_rate=1e-2, use_cpu=True, bf16=False,
        report_to=[], logging_steps=1, save_strategy="no", use_vllm=True, vllm_mode="server",
        vllm_server_base_url=url, vllm_group_port=free_port(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["abc def", "hello", "one two", "x y"] * 8}),
    )
    engine = trainer.vllm_generation
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    engine.sync_weights()
    found = answers(engine.vllm_client)
    module = trainer.model.eval()
    moved = max(float((p.detach() - before[n]).abs().max()) for n, p in module.named_parameters())
    return {
        "steps": STEPS,
        "weights moved by": moved,
        "largest difference from transformers": rounding(module, *found),
        "same bits as a start": found == started_anew(folder, module, base / "trained"),
    }


def main() -> int:
    """Serve, send, train and compare; the exit code is 1 where the engine is not the policy."""
    base = Path(tempfile.mkdtemp())
    os.environ |= {"NETRC": str(base / "netrc"), "VLLM_HOST_IP": "127.0.0.1"}
    (base / "netrc").write_text(f"machine 127.0.0.1\nlogin trainer\npassword {KEY}\n")
    (base / "netrc").chmod(0o600)
    import_module("quire.as_vllm")  # before trl looks for vllm
    from trl.generation.vllm_client import VLLMClient

    from quire.testing import make_checkpoint

    join = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda client, device=0: join(client, "cuda")
    shape = {"num_hidden_layers": 2, "vocab_size": 320}
    folder = make_checkpoint(base / "model", shape, "qwen3", dtype="float32")
    port = free_port()
    server = start_server(folder, port)
    url = f"http://127.0.0.1:{port}"
    try:
        client = VLLMClient(base_url=url, group_port=free_port(), connection_timeout=120.0)
        client.init_communicator()
        figures = send_by_hand(client, folder, base)
        client.close_communicator()
        figures |= train(url, folder, base)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(figures))
    are_same = figures["client, same bits as a start"] and figures["same bits as a start"]
    is_near = figures["largest difference from transformers"] < 0.2
    return 0 if are_same and is_near and figures["weights moved by"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
