"""Whole engines with random weights made on the device: latency, throughput, start, idle time."""

from __future__ import annotations

import gc
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu.ceilings import Ceilings, DecoderShape, decode_seconds, prefill_flops
from gpu.clock import busy_share
from gpu.told import Line
from quire import LLM, SamplingParams
from quire.testing.model_shapes import SHAPES, make_config
from quire.testing.tiny_tokenizer import write_tokenizer

_SINGLE_TOKENS = 128
_URL = "http://127.0.0.1:8123"
_PEER_SECONDS = 120
_LEAST_GAP_US = 5
"""Shorter gaps are between the kernels of one graph: nobody's host is late there."""

_SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_seqs": 256,
    "enable_prefix_caching": False,
}


@contextmanager
def engine(shape: str, device: str = "cuda", **settings: Any) -> Iterator[LLM]:
    """An engine for a named shape, bfloat16; its memory is free again afterwards."""
    config = config_of(shape)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), config["vocab_size"])
        Path(folder, "config.json").write_text(json.dumps(config))
        chosen = _SETTINGS | {"device": device} | settings
        with LLM(folder, **chosen) as llm:
            yield llm
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


EXPERTS: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
}  # fmt: skip
"""What tells Qwen3-30B-A3B from a tiny model of its family, with 24 of its 48 layers."""


def config_of(shape: str) -> dict[str, Any]:
    """The config.json of a named shape."""
    if shape == "experts":
        return make_config(EXPERTS, "qwen3_moe") | {"torch_dtype": "bfloat16"}
    return make_config(shape, SHAPES[shape].family) | {"torch_dtype": "bfloat16"}


def prompts_of(shape: str, count: int, length: int) -> list[dict[str, list[int]]]:
    """Random prompts, the same every time."""
    rng = random.Random(0)
    vocab = config_of(shape)["vocab_size"]
    return [
        {"prompt_token_ids": [rng.randrange(10, vocab) for _ in range(length)]}
        for _ in range(count)
    ]


def generate_seconds(
    llm: LLM, prompts: list[dict[str, list[int]]], num_tokens: int, *, is_greedy: bool = True
) -> float:
    """From the first prompt to the last token, `num_tokens` each; with temperature and top-p as
    chat models ask for them where it is not greedy.
    """
    drawn = {"temperature": 0.0} if is_greedy else {"temperature": 0.6, "top_p": 0.9}
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **drawn)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def itl_seconds(
    llm: LLM, prompts: list[dict[str, list[int]]], num_tokens: int, *, is_greedy: bool = True
) -> float:
    """Seconds of a decode step: the time of many tokens less that of one, per token between."""
    few = generate_seconds(llm, prompts, 1, is_greedy=is_greedy)
    many = generate_seconds(llm, prompts, num_tokens, is_greedy=is_greedy)
    return (many - few) / (num_tokens - 1)


def large(ceilings: Ceilings) -> Iterator[Line]:
    """The 8B shape: start, single stream, 8, 64 and 256 together, prefill."""
    shape = DecoderShape.of(config_of("8b"))
    start = time.perf_counter()
    with engine("8b") as llm:
        generate_seconds(llm, prompts_of("8b", 1, 16), 1)
        took = time.perf_counter() - start
        yield Line("8B start to first token", took, "s", 15, is_least=False)
        generate_seconds(llm, prompts_of("8b", 256, 128), 8)  # warm
        yield from _single(llm, "8b", shape, ceilings, 4.6)
        itl = itl_seconds(llm, prompts_of("8b", 1, 128), _SINGLE_TOKENS, is_greedy=False)
        yield Line("8B batch 1, temperature 0.6, top-p 0.9: ITL", itl * 1e3, "ms")
        for rows, num_tokens in ((8, 128), (64, 128), (256, 256)):
            yield from _together(llm, "8b", shape, ceilings, rows, num_tokens)
        for rows, length in ((1, 512), (1, 2048), (8, 2048), (2, 8192 - 64)):
            yield _prefill(llm, "8b", shape, ceilings, rows, length)
        yield from _idle(llm, "8b", 64)


def _single(
    llm: LLM, name: str, shape: DecoderShape, ceilings: Ceilings, target: float | None = None
) -> Iterator[Line]:
    itl = itl_seconds(llm, prompts_of(name, 1, 128), _SINGLE_TOKENS)
    floor = decode_seconds(shape, ceilings, 1, 192)
    note = f"roofline {floor * 1e3:.2f} ms, {100 * floor / itl:.0f} % of it"
    yield Line(f"{name.upper()} batch 1, ITL", itl * 1e3, "ms", target, is_least=False, note=note)


def _together(
    llm: LLM, name: str, shape: DecoderShape, ceilings: Ceilings, rows: int, num_tokens: int
) -> Iterator[Line]:
    prompts = prompts_of(name, rows, 128)
    whole = generate_seconds(llm, prompts, num_tokens)
    first = generate_seconds(llm, prompts, 1)
    step = (whole - first) / (num_tokens - 1)
    floor = decode_seconds(shape, ceilings, rows, 128 + num_tokens // 2)
    rate = rows * num_tokens / whole
    label = f"{name.upper()} {rows} together, 128 in / {num_tokens} out"
    yield Line(f"{label}: output", rate, "tokens/s", note=f"first tokens after {first:.2f} s")
    note = f"step {step * 1e3:.2f} ms, roofline {floor * 1e3:.2f} ms"
    yield Line(f"{label}: of roofline", 100 * floor / step, "%", 70, note=note)


def _prefill(
    llm: LLM, name: str, shape: DecoderShape, ceilings: Ceilings, rows: int, length: int
) -> Line:
    prompts = prompts_of(name, rows, length)
    seconds = min(generate_seconds(llm, prompts, 1) for _ in range(3))
    share = prefill_flops(shape, rows, length) / ceilings.flops_per_s / seconds
    note = f"{rows * length / seconds:.0f} tokens/s, {seconds * 1e3:.1f} ms"
    label = f"{name.upper()} prefill {rows} x {length}, of bf16 peak"
    return Line(label, 100 * share, "%", 60, note=note)


def small(ceilings: Ceilings) -> Iterator[Line]:
    """The 0.6B shape: single stream, 256 together, and how much of that the GPU is idle."""
    shape = DecoderShape.of(config_of("0.6b"))
    with engine("0.6b") as llm:
        generate_seconds(llm, prompts_of("0.6b", 256, 128), 8)  # warm
        yield from _single(llm, "0.6b", shape, ceilings)
        yield from _together(llm, "0.6b", shape, ceilings, 256, 256)
        yield from _idle(llm, "0.6b", 256)


def _idle(llm: LLM, name: str, rows: int) -> Iterator[Line]:
    """How much of the time the device waits, and which kernels take the rest of it."""
    events = _device_events(llm, prompts_of(name, rows, 128))
    intervals = [(event.time_range.start, event.time_range.end) for event in events]
    idle = 100 * (1 - busy_share(intervals, _LEAST_GAP_US))
    note = f"gaps of {_LEAST_GAP_US} us and more; {100 * (1 - busy_share(intervals)):.1f} in all"
    label = f"{name.upper()} {rows} together: device"
    yield Line(f"{label} idle", idle, "%", 3, is_least=False, note=note)
    taken: Counter[str] = Counter()
    for event in events:
        taken[event.name[:60]] += event.time_range.end - event.time_range.start
    whole = sum(taken.values())
    note = "; ".join(f"{n} {100 * t / whole:.1f} %" for n, t in taken.most_common(14))
    yield Line(f"{label} time by kernel", whole / 1e3, "ms", note=note)


def eight(ceilings: Ceilings) -> Iterator[Line]:
    """The 8B shape with weights and K/V in 8-bit floats: single stream, 256 together, memory."""
    label = "8B, fp8 weights and K/V"
    with engine("8b", quantization="fp8", kv_cache_dtype="fp8") as llm:
        generate_seconds(llm, prompts_of("8b", 256, 128), 8)  # warm
        shape = replace(DecoderShape.of(config_of("8b")), itemsize=1)  # a scale in 128 left out
        yield from _rounded(llm, label, shape, ceilings)
        [held] = llm.collective_rpc("kv_cache_bytes")
        tokens = held / (shape.kv_bytes_per_token * (1 + 4 / shape.head_dim))
        yield Line(f"{label}: tokens in the KV cache", tokens, "tokens", note=f"{held} bytes")


def int4(ceilings: Ceilings) -> Iterator[Line]:
    """The 8B shape with int4 weights (W4A16): single stream, 64 together, prefill."""
    with engine("8b", quantization="int4") as llm:
        generate_seconds(llm, prompts_of("8b", 256, 128), 8)  # warm
        shape = replace(DecoderShape.of(config_of("8b")), itemsize=0.5)
        yield from _rounded(llm, "8B, int4 weights", shape, ceilings)


def _rounded(llm: LLM, label: str, shape: DecoderShape, ceilings: Ceilings) -> Iterator[Line]:
    itl = itl_seconds(llm, prompts_of("8b", 1, 128), _SINGLE_TOKENS)
    floor = decode_seconds(shape, ceilings, 1, 192)
    yield Line(f"{label}: batch 1, ITL", itl * 1e3, "ms", note=f"roofline {floor * 1e3:.2f} ms")
    for rows in (64, 256):
        seconds = generate_seconds(llm, prompts_of("8b", rows, 128), 128)
        yield Line(f"{label}: {rows} together, 128 in / 128 out", rows * 128 / seconds, "tokens/s")
    seconds = min(generate_seconds(llm, prompts_of("8b", 4, 2048), 1) for _ in range(2))
    yield Line(f"{label}: prefill 4 x 2048", 4 * 2048 / seconds, "tokens/s")


def experts(ceilings: Ceilings) -> Iterator[Line]:
    """Half the layers of Qwen3-30B-A3B: a single stream, 64 together, prefill."""
    label = f"{EXPERTS['num_hidden_layers']} layers of 30B-A3B"
    with engine("experts") as llm:
        generate_seconds(llm, prompts_of("experts", 64, 128), 8)  # warm
        itl = itl_seconds(llm, prompts_of("experts", 1, 128), _SINGLE_TOKENS)
        c = config_of("experts")
        active = c["num_experts_per_tok"] * 3 * c["hidden_size"] * c["moe_intermediate_size"]
        attention = c["hidden_size"] * c["head_dim"] * 2
        attention *= c["num_attention_heads"] + c["num_key_value_heads"]
        count = c["num_hidden_layers"] * (active + attention) + c["vocab_size"] * c["hidden_size"]
        floor = 2 * count / ceilings.bytes_per_s
        note = f"reading the active weights takes {floor * 1e3:.2f} ms"
        yield Line(f"{label}: batch 1, ITL", itl * 1e3, "ms", note=note)
        seconds = generate_seconds(llm, prompts_of("experts", 64, 128), 128)
        yield Line(f"{label}: 64 together, 128 in / 128 out", 64 * 128 / seconds, "tokens/s")
        seconds = min(generate_seconds(llm, prompts_of("experts", 4, 2048), 1) for _ in range(2))
        yield Line(f"{label}: prefill 4 x 2048", 4 * 2048 / seconds, "tokens/s")
        yield from _idle(llm, "experts", 64)


def server() -> Iterator[Line]:
    """`quire serve` of the 8B shape and `quire bench serve` with 64 clients, 512 in / 128 out."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), config_of("8b")["vocab_size"])
        Path(folder, "config.json").write_text(json.dumps(config_of("8b")))
        command = [sys.executable, "-m", "quire", "serve", folder, "--device", "cuda"]
        command += ["--load-format", "dummy", "--max-model-len", "4096", "--port", "8123"]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr) as process:
            try:
                _wait_until_healthy(f"{_URL}/health", process)
                yield Line("server of 8B: start to ready", time.perf_counter() - start, "s")
                yield from _load_of_clients(folder)
            finally:
                process.terminate()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit status {process.returncode}")
        time.sleep(0.2)


def _load_of_clients(folder: str) -> Iterator[Line]:
    result = Path(folder, "bench.json")
    command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", _URL]
    command += ["--max-concurrency", "64", "--num-prompts", "256", "--random-input-len", "512"]
    command += ["--random-output-len", "128", "--ignore-eos", "--save-result"]
    command += ["--result-filename", str(result), "--dataset-name", "random"]
    subprocess.run(command, check=True, stdout=sys.stderr, stderr=sys.stderr)
    found = json.loads(result.read_text())
    for key in ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms"):
        yield Line(f"server of 8B, 64 clients: {key}", found[key])


def host() -> Iterator[Line]:
    """A model so small that a step takes what the host takes."""
    for rows in (1, 256):
        with engine("tiny", max_num_seqs=rows) as llm:
            prompts = prompts_of("tiny", rows, 32)
            generate_seconds(llm, prompts, 8)
            step = itl_seconds(llm, prompts, 256)
            yield Line(f"host time of a step, {rows} rows", step * 1e6, "us")


def _device_events(llm: LLM, prompts: list[dict[str, list[int]]]) -> list[Any]:
    """What the device computed or copied while all rows decoded, in order."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        generate_seconds(llm, prompts, 64)
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    return events[len(events) // 4 : -len(events) // 20]  # without the prompts and the end


def peer(until: float) -> Iterator[Line]:
    """The 8B shape in transformers' continuous batching, 256 together: the same work, or an eighth
    of it where the time is short.
    """
    num_tokens = 512 if until - time.monotonic() > _PEER_SECONDS else 64
    label = f"transformers, 8B 256 together, 128 in / {num_tokens} out: output"
    if importlib.util.find_spec("transformers") is None:
        yield Line(label, None, note="transformers is not installed")
        return
    if time.monotonic() > until:
        yield Line(label, None, note="the time was over")
        return
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of("8b")))
        config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="paged|sdpa"
        ).eval()
    prompts = [p["prompt_token_ids"] for p in prompts_of("8b", 256, 128)]

    def settings(num_tokens: int) -> Any:
        return GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)

    model.generate_batch(inputs=prompts[:8], generation_config=settings(4))  # warm
    start = time.perf_counter()
    model.generate_batch(inputs=prompts, generation_config=settings(num_tokens))
    yield Line(label, 256 * num_tokens / (time.perf_counter() - start), "tokens/s")
