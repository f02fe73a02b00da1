"""Is the first request of a kind as fast as those after it?

A server of each of three models (one that answers texts, with an adapter; one that embeds; one that
takes pictures) is given three requests of each kind, a few seconds after it is ready: seconds and
processor seconds of all its processes for the first, and what it takes in terms of the shorter of
the other two. On machines with other work go by the latter.

    PYTHONPATH=src python -m benchmarks.first_requests
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from safetensors.torch import save_file

from benchmarks.picture_encoder import jpeg, write_model
from benchmarks.sweeping.sweep_server import running_server
from quire.bench.report import add_output_flag, finish
from quire.bench.workload import random_model
from quire.models.config_reader import read_config

NAME, ADAPTER = "model", "adapter"
_TEXT = "The answer to the question of the day is that nobody has asked it yet, and "
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look up.", "parameters": _SCHEMA},
}
_SAID = [{"role": "user", "content": _TEXT}]
_NAMED = {"type": "function", "function": {"name": "look_up"}}
_FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}


class Kind(msgspec.Struct, frozen=True):
    """A route, and what its body has beside model, text and limit."""

    route: str
    body: dict[str, Any]


def completion(**body: Any) -> Kind:
    """A kind of `/v1/completions`."""
    return Kind("/v1/completions", {"prompt": _TEXT, "max_tokens": 8, "temperature": 0.0, **body})


def chat(**body: Any) -> Kind:
    """A kind of `/v1/chat/completions`."""
    return Kind(
        "/v1/chat/completions", {"messages": _SAID, "max_tokens": 8, "temperature": 0.0, **body}
    )


TEXTS = {
    "plain": completion(),
    "chat": chat(),
    "stream": completion(stream=True),
    "top-p": completion(top_p=0.9, temperature=1.0),
    "top-k and min-p": completion(top_k=20, min_p=0.05, temperature=1.0),
    "penalties": completion(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "log-probabilities": completion(logprobs=5),
    "of prompts": completion(prompt_logprobs=3),
    "n of 4": completion(n=4, temperature=1.0),
    "stop strings": completion(stop=["xyz", "\n\n\n"]),
    "bad words": completion(bad_words=["yes"]),
    "JSON schema": chat(response_format=_FORM),
    "regex": completion(structured_outputs={"regex": "[a-z]{3,8}-[0-9]{2}"}),
    "choice": completion(structured_outputs={"choice": ["red", "green", "blue"]}),
    "grammar": completion(structured_outputs={"grammar": 'root ::= "a" root | "b"'}),
    "tools, the model's choice": chat(tools=[_TOOL], tool_choice="auto"),
    "a tool by name": chat(tools=[_TOOL], tool_choice=_NAMED),
    "tools, required": chat(tools=[_TOOL], tool_choice="required"),
    "adapter": completion(model=ADAPTER),
    "/v1/messages": Kind("/v1/messages", {"messages": _SAID, "max_tokens": 8}),
    "/v1/responses": Kind("/v1/responses", {"input": _TEXT, "max_output_tokens": 8}),
    "/tokenize": Kind("/tokenize", {"prompt": _TEXT}),
}
EMBEDDED = {
    "embedding": Kind("/v1/embeddings", {"input": _TEXT}),
    "eight embeddings": Kind("/v1/embeddings", {"input": [_TEXT * (1 + i) for i in range(8)]}),
    "base64": Kind("/v1/embeddings", {"input": _TEXT, "encoding_format": "base64"}),
    "score": Kind("/score", {"text_1": _TEXT, "text_2": [_TEXT, "No."]}),
    "rerank": Kind("/rerank", {"query": _TEXT, "documents": [_TEXT, "No."]}),
}


def picture(seed: int) -> Kind:
    """A chat with a picture that nobody has seen yet."""
    url = "data:image/jpeg;base64," + base64.b64encode(jpeg(seed)).decode()
    said = [{"type": "text", "text": "w1 w2"}, {"type": "image_url", "image_url": {"url": url}}]
    return chat(messages=[{"role": "user", "content": said}])


def main() -> int:
    """Measure one model after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random-model", default="0.6b", help="of texts and embeddings")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pause", type=float, default=4.0, help="seconds after it is ready")
    add_output_flag(parser)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            found |= MODELS[model](args, Path(folder))
    finish({"kinds": found}, args.output_json)
    return 0


def texts(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The kinds of a model that answers texts."""
    model = random_model(args.random_model)
    adapter = write_adapter(model, scratch / "adapter")
    flags = ["--enable-lora", "--lora-modules", f"{ADAPTER}={adapter}", "--max-logprobs", "5"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return measure(args, model, flags, {name: [kind] * 3 for name, kind in TEXTS.items()})


def embeddings(args: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Those of a model that embeds."""
    flags = ["--runner", "pooling", "--convert", "embed"]
    kinds = {name: [kind] * 3 for name, kind in EMBEDDED.items()}
    return measure(args, random_model(args.random_model), flags, kinds)


def pictures(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """A picture, on CLIP's large tower with a small decoder."""
    folder = scratch / "pictures"
    folder.mkdir()
    write_model(folder, torch.bfloat16, 24)
    words = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    words += "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }} {% else %}<image> "
    words += "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    template = scratch / "template.jinja"
    template.write_text(words)
    kinds = {"chat of a small model": [chat(messages=[{"role": "user", "content": "w1 w2"}])] * 3}
    kinds["picture"] = [picture(seed) for seed in range(3)]
    return measure(args, folder, ["--chat-template", str(template)], kinds)


MODELS = {"texts": texts, "embeddings": embeddings, "pictures": pictures}


def measure(
    args: argparse.Namespace, model: Path, flags: Sequence[str], kinds: Mapping[str, list[Kind]]
) -> dict[str, Any]:
    """Three requests of each kind, one after the other."""
    found = {}
    with serving(model, flags) as url:
        time.sleep(args.pause)
        for name, requests in kinds.items():
            seconds, processor = zip(*(timed(url, kind) for kind in requests), strict=True)
            found[name] = {
                "seconds": seconds[0],
                "ratio": seconds[0] / min(seconds[1:]),
                "processor_seconds": processor[0],
                "processor_ratio": processor[0] / max(0.01, min(processor[1:])),
            }
            print(f"{name:28}", *(f"{k} {v:.3f}" for k, v in found[name].items()), flush=True)
    return found


def timed(url: str, kind: Kind) -> tuple[float, float]:
    """Seconds and processor seconds of a request."""
    body = kind.body if kind.route == "/rerank" else {"model": NAME, **kind.body}
    request = urllib.request.Request(
        url + kind.route, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    before, began = used(), time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    return time.perf_counter() - began, used() - before


def used() -> float:
    """Processor seconds of the server's processes."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


@contextmanager
def serving(model: Path, flags: Sequence[str]) -> Iterator[str]:
    """A server of a model; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "quire", "serve", str(model), "--served-model-name", NAME]
    words += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "1024"]
    words += ["--max-num-seqs", "16", "--no-enable-prefix-caching", *flags]
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.NamedTemporaryFile() as log,
        running_server(words, url, Path(log.name), ready_s=300, shows=False),
    ):
        yield url


def write_adapter(model: Path, folder: Path) -> Path:
    """An adapter of queries and values, as PEFT writes it."""
    config, rank = read_config(model), 8
    width, head = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": head * config["num_attention_heads"],
        "v_proj": head * config["num_key_value_heads"],
    }
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            begin = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{begin}.lora_A.weight"] = 0.01 * torch.randn(rank, width, generator=draw)
            tensors[f"{begin}.lora_B.weight"] = 0.01 * torch.randn(size, rank, generator=draw)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16}
    about |= {"target_modules": list(outputs), "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
